"""Text of files and models as a terminal may show it."""


def printable(text: object) -> str:
    r"""Returns a text on one line, with its control characters spelled out, as in \x1b[2J.

    A terminal would obey them: they can clear it, change its title or hide what follows.
    """
    shown = []
    for character in str(text):
        if character.isprintable():
            shown.append(character)
        elif character.isspace():
            shown.append(" ")
        else:
            shown.append(character.encode("unicode_escape").decode())
    return "".join(shown)
