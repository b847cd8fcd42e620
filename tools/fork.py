"""Makes a whole script of a credit method, beside grpo_arca.py.

    python tools/fork.py methods/entropy_mask.py      # writes grpo_entropy_mask.py
    python tools/fork.py --scripts                    # copies grpo_arca.py's trainer to the others

The script is grpo_arca.py with another docstring and other CREDIT regions. So it trains, resumes
and diffs like every grpo_*.py, and its runs and cards have the method's name. To change the method,
edit its file and fork it again, which replaces the script.

The file of a method has the docstring of the future script (formula, source, which parts are
public) and what belongs between a script's marks. What surrounds the marks makes it Python, for
editors and checkers; of this, imports that grpo_arca.py lacks are taken along:

    from torch import Tensor

    from grpo_arca import Batch, Run, flag  # what stands below of grpo_arca.py

    class Flags:
        # === CREDIT ===
        floor: float = flag(0.1, "least weight of a token")
        # === END CREDIT ===

    # === CREDIT ===
    def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
        return micro.entropy.clamp(min=run.args.floor)
    # === END CREDIT ===

A method without flags has the second region alone. This region holds those of token_scores,
assign_credit and surrogate_terms that differ from GRPO's, and other functions that they call. The
rest of the three is copied from methods/grpo.py. Whatever else is used but not defined is copied
from there, such as `set_credit`, or from the regions of grpo_arca.py: functions such as
`normalize`, and flags. To please editors, import such functions outside the marks.

If there is no flag `credit`, it is added. Its default is the file's name. To scores of the method
that GRPO's assign_credit turns into credit, it also offers two controls, random and shuffled. A
method need not include plain GRPO: that is grpo_arca.py --credit uniform, which is the same outside
the regions.
"""

import argparse
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(^ *# === (?:END )?CREDIT ===\n)", re.M)
NAME = re.compile(r"(?:def |class |from \S+ import )?(\w+)")
IMPORT = re.compile(r"^(?:from (?!grpo_arca |methods)\S+ )?import (?:\([^)]*\)|.*)\n", re.M)


def statements(code: str) -> dict[str, str]:
    """Returns the statements of unindented code, by the names that they define."""
    texts = re.split(r"^(?=\w)", code, flags=re.M)[1:]
    return {NAME.findall(text)[0]: text for text in texts}


def inherited(code: str, own: str, source: str) -> str:
    """Returns the statements of a source that some code names, and those that they name in turn.

    Statements that are also in `own` are left out.
    """
    texts = statements(source)
    taken: set[str] = set()
    for _ in texts:  # each time may find more
        taken = set(re.findall(r"\w+", code)) & texts.keys() - statements(own).keys()
        code += "".join(texts[name] for name in taken)
    return "".join(text for name, text in texts.items() if name in taken)


def further_imports(head: str, arcas_head: str) -> str:
    """Returns the imports of a method's file that name something which grpo_arca.py's do not."""
    known = set(re.findall(r"\w+", "".join(IMPORT.findall(arcas_head))))
    return "".join(text for text in IMPORT.findall(head) if set(re.findall(r"\w+", text)) - known)


def fork(method: Path) -> str:
    """Returns the script of a method's file."""
    arca = MARK.split((ROOT / "grpo_arca.py").read_text())  # marks are at the odd places
    own = MARK.split(method.read_text())
    if len(own) not in (5, 9):
        raise SystemExit(f"{method} must have one or two regions between CREDIT marks")
    flags = textwrap.dedent(own[2]) if len(own) == 9 else ""
    imports = further_imports(own[0], arca[0])
    code = own[-3].rstrip() + "\n\n\n"
    if "credit" not in statements(flags):
        functions = statements(code)
        # Where scores are not the method's own, or do not reach the loss, no order of them matters.
        reads_credit = ".credit" in functions.get("surrogate_terms", ".credit")
        has_controls = "token_scores" in functions and "assign_credit" not in functions
        controls = ', "random", "shuffled"' if has_controls and reads_credit else ""
        flags = (
            f'credit: Literal["{method.stem}"{controls}] = flag(\n'
            f'    "{method.stem}", "what splits the advantage"\n)\n{flags}'
        )
    code = f"{imports}\n\n{code}" if imports else code
    grpo = MARK.split((ROOT / "methods/grpo.py").read_text())[2]
    known = "".join((statements(arca[6]) | statements(grpo)).values())
    # The loop calls three functions, whether they are the method's own or not.
    arca[6] = code + inherited(f"{code} token_scores assign_credit surrogate_terms", code, known)
    flags += inherited(arca[6], flags, textwrap.dedent(arca[2]))
    arca[2] = textwrap.indent(flags, "    ")
    how_to_read = arca[0][arca[0].index("How to read this file") :]
    arca[0] = (
        '"""'.join(own[0].split('"""', 2)[:2]).rstrip()
        + f"\n\n    accelerate launch grpo_{method.stem}.py\n\n{how_to_read}"
    )
    return "".join(arca)


def with_arcas_trainer(script: str) -> str:
    """Returns a script whose text outside its docstring and CREDIT regions is grpo_arca.py's."""
    parts = MARK.split((ROOT / "grpo_arca.py").read_text())
    own = MARK.split(script)
    docstring = own[0].split('"""')[1]
    rest = parts[0].split('"""', 2)[2]
    parts[0] = f'"""{docstring}"""{rest}'
    parts[2::4] = own[2::4]  # both regions
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("method", nargs="?", type=Path, help="its file")
    what.add_argument("--scripts", action="store_true", help="update the other two scripts")
    options = parser.parse_args()
    if options.scripts:
        for path in (ROOT / "grpo_oar.py", ROOT / "grpo_strace.py"):
            path.write_text(with_arcas_trainer(path.read_text()))
    elif options.method.stem in ("arca", "oar", "strace"):
        parser.error(f"grpo_{options.method.name} is one of the three scripts: rename the method")
    else:
        (ROOT / f"grpo_{options.method.stem}.py").write_text(fork(options.method))


if __name__ == "__main__":
    main()
