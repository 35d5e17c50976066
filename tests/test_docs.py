"""Every example in the documentation and in `examples/` runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.errors import LabError
from thinwire.lab import Lab
from thinwire.lab.ports import reserve_port
from thinwire.recipes import recipe_names

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text()))


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(script: Path, *arguments: str, folder: Path) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launcher, str(script), *arguments], folder)


def beside_a_server(script: Path, *, folder: Path) -> str:
    launcher = [sys.executable, "-m", "thinwire", "launch", "--servers-per-node", "1", "--nproc-per-node", "2"]
    ports = ["--port", str(reserve_port()), "--master-port", str(reserve_port())]
    return run([*launcher, *ports, str(script)], folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page)], ids=name_of)
def test_code_of_page_runs(page: Path, tmp_path: Path) -> None:
    """The blocks of a page, one after another, are one program; on two ranks if it makes a process group.

    With a server beside them if it attaches to those that `thinwire launch` starts.
    """
    if "Lab(" in code_of(page):
        try:
            Lab(nodes=1).close()
        except LabError as error:
            pytest.skip(str(error))
    script = tmp_path / "page.py"
    script.write_text(code_of(page))
    if "init_process_group(" in code_of(page):
        (beside_a_server if 'servers="env"' in code_of(page) else torchrun)(script, folder=tmp_path)
    else:
        run([sys.executable, str(script)], tmp_path)


def test_pages_with_code_are_found() -> None:
    """Guards the pattern above: these pages have examples."""
    assert {name_of(page) for page in PAGES if code_of(page)} >= {"README.md", "docs/quickstart.md", "docs/recipes.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


def test_recipe_page_lists_every_kind() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    table = page.partition("| kind |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    kinds = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert kinds | {"int7", "int6", "int5", "int4", "int3"} == set(recipe_names())  # "`int8`, ..., `int2`"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py", "train_diloco.py"])
def test_example_script_learns_the_digits(script: str, tmp_path: Path) -> None:
    output = torchrun(ROOT / "examples" / script, "int4", folder=tmp_path)
    accuracy = re.search(r"int4: accuracy ([\d.]+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.9  # chance is 0.1
