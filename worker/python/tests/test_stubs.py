"""Tests that the stubs (.pyi) have each public name of the package, with its signature, and no
other one."""

import ast
import importlib
import inspect
import pathlib
import unittest

try:
    import elasticdl
except ImportError as error:
    raise unittest.SkipTest(f"{error}: install the package, with `pip install worker/python`")

PACKAGE = pathlib.Path(elasticdl.__file__).parent


def modules(suffix):
    """The names of the modules that files with this suffix describe."""
    paths = (path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*" + suffix))
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}


def is_public(name):
    return name == "__init__" or not name.startswith("_")


def declared(body):
    """What the statements of a stub declare, by name."""
    names = {}
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = node
        elif isinstance(node, ast.ImportFrom):
            names |= {each.name: node for each in node.names if each.name == each.asname}
    return {name: node for name, node in names.items() if is_public(name)}


def stub(module):
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    return declared(ast.parse(path.read_text()).body)


def of_stub(node):
    """The parameters in a stub of a function, but ``self``: kind, name, and whether each has a
    default."""
    given, kind = node.args, inspect.Parameter
    positional = [(kind.POSITIONAL_ONLY, each) for each in given.posonlyargs]
    positional += [(kind.POSITIONAL_OR_KEYWORD, each) for each in given.args]
    required = len(positional) - len(given.defaults)
    found = [(k, each.arg, i >= required) for i, (k, each) in enumerate(positional)]
    found = found[1:] if found and found[0][1] == "self" else found
    found += [(kind.VAR_POSITIONAL, each.arg, False) for each in [given.vararg] if each]
    for each, default in zip(given.kwonlyargs, given.kw_defaults):
        found.append((kind.KEYWORD_ONLY, each.arg, default is not None))
    return found + [(kind.VAR_KEYWORD, each.arg, False) for each in [given.kwarg] if each]


def of_function(function):
    """As :func:`of_stub`, of a function of the package."""
    parameters = inspect.signature(function).parameters.values()
    found = [(each.kind, each.name, each.default is not each.empty) for each in parameters]
    return found[1:] if found and found[0][1] == "self" else found


def split(kind):
    """The classes of the package that a class consists of, and other ones. Those of a subclass
    count: a class that is only a base may replace methods of the other base."""
    all_of = {each for one in [kind, *kind.__subclasses__()] for each in one.__mro__}
    ours = {each for each in kind.__mro__ if each.__module__.split(".")[0] == "elasticdl"}
    return ours, all_of - ours - set(kind.__subclasses__())


def stores(kind, name):
    """Whether a class of the package stores an attribute of this name."""
    sources = [inspect.cleandoc("\n" + inspect.getsource(each)) for each in split(kind)[0]]
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    stored = (n.attr for n in nodes if isinstance(n, ast.Attribute) and type(n.ctx) is ast.Store)
    return name in stored


def members(kind):
    """The public methods and properties that the package adds to those of other base classes."""
    ours, others = split(kind)
    names = {name for each in ours for name in vars(each) if not name.startswith("_")}
    return names - {name for each in others for name in dir(each)}


class StubsTest(unittest.TestCase):
    def test_each_public_module_has_a_stub(self):
        public = {m for m in modules(".py") if not any(p.startswith("_") for p in m.split("."))}
        self.assertEqual(public - modules(".pyi"), {"elasticdl.integrations"})
        self.assertTrue((PACKAGE / "py.typed").is_file())

    def test_a_stub_has_the_public_names_of_its_module_with_their_signatures(self):
        for name in sorted(modules(".pyi")):
            with self.subTest(name):
                try:
                    module = importlib.import_module(name)
                except ImportError as error:
                    self.skipTest(str(error))
                self.check(module, stub(name))

    def check(self, module, stubs):
        if not module.__name__.rpartition(".")[2].startswith("_"):
            public = getattr(module, "__all__", None) or [
                name for name, each in vars(module).items()
                if is_public(name) and getattr(each, "__module__", None) == module.__name__
            ]
            self.assertEqual(set(stubs), set(public))
        for name, node in stubs.items():
            where = f"{module.__name__}.{name}"
            if isinstance(node, ast.ImportFrom):
                self.assertIn(name, stub(f"{module.__name__}.{node.module}"))
            elif isinstance(node, ast.FunctionDef):
                self.assertEqual(of_stub(node), of_function(getattr(module, name)), where)
            # The extension does not export classes of which it only returns instances.
            elif hasattr(module, name) or module.__name__ != "elasticdl._elasticdl":
                self.check_class(where, getattr(module, name), node)

    def check_class(self, where, kind, node):
        bases = [stub(each.__module__).get(each.__name__)
                 for each in split(kind)[0] if each.__module__ in modules(".pyi")]
        bodies = [each.body for each in [node, *bases] if isinstance(each, ast.ClassDef)]
        names = {name for body in bodies for name in declared(body)}
        self.assertEqual(members(kind) - names, set(), f"{where}: not in the stub")
        for name, each in declared(node.body).items():
            found = inspect.getattr_static(kind, name, None)
            at = f"{where}.{name}"
            if isinstance(each, ast.AnnAssign):
                fields = getattr(kind, "__dataclass_fields__", ())
                is_there = name in fields or inspect.isdatadescriptor(found)
                self.assertTrue(is_there or stores(kind, name), at)
            elif any(getattr(of, "id", "") == "property" for of in each.decorator_list):
                self.assertTrue(inspect.isdatadescriptor(found), at)
            elif name == "__init__":
                self.assertEqual(of_stub(each), of_function(kind), at)
            else:
                found = found.__func__ if isinstance(found, staticmethod) else found
                self.assertEqual(of_stub(each), of_function(found), at)
