"""The source files of a program."""

import os
import sys
import types


def loaded_sources():
    """Name and path of each source file that this process has loaded from the program's folder: of
    its main file, and of the modules that lie in the folder of the main file or below it.

    The folder may have another name on another worker, and may have files that no worker loads. A
    program without a main file, such as that of ``python -c``, has none.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or not path.endswith(".py"):
        return []
    # Of `python -m package.module`, the folder in which the package lies.
    spec = getattr(main, "__spec__", None)
    up = [os.pardir] * len(spec.parent.split(".")) if spec is not None and spec.parent else []
    # Python imports from the folder that the main file really lies in.
    main_file = os.path.abspath(path)
    folders = {
        os.path.normpath(os.path.join(os.path.dirname(file), *up))
        for file in (main_file, os.path.realpath(main_file))
    }
    found = {}
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        file = os.path.abspath(file)
        if file.startswith(_LIBRARY):
            continue
        for folder in folders:
            parts = os.path.relpath(file, folder).split(os.sep)
            if not any(part.startswith(".") or part in _FOREIGN for part in parts):
                found["/".join(parts)] = file
    return sorted(found.items())


# Folders of Python and of installed packages, also in an environment within the program's folder.
_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_FOREIGN = ("site-packages", "dist-packages")
