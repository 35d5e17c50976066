"""Starting the lab's own helper processes.

They must enter user namespaces, which the kernel allows to single-threaded processes only, and start in milliseconds.
So they load the modules of this directory without running ``thinwire/__init__.py``, which may load torch.
"""

import json
import sys
from pathlib import Path

_LAB = Path(__file__).resolve().parent
_BOOTSTRAP = """
import sys, types
lab, module = sys.argv[1:3]
for name, path in (("thinwire", lab + "/.."), ("thinwire.lab", lab)):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
import importlib
importlib.import_module("thinwire.lab." + module).main(*sys.argv[3:])
"""


def command(module: str, *arguments: object) -> list[str]:
    """Command line that runs ``main(*arguments)`` of a module of this directory; arguments travel as JSON."""
    words = [json.dumps(argument) for argument in arguments]
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(_LAB), module, *words]
