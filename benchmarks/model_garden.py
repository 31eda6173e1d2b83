"""The TF Model Garden's optimizers, without the models around them."""

import importlib.metadata
import importlib.util


def load(name):
    """Returns a module of its optimization package.

    From its file: to import the package is to import TensorFlow Text and all else that
    the Model Garden's models need.
    """
    path = f"official/modeling/optimization/{name}.py"
    files = importlib.metadata.files("tf-models-official")
    [file] = [f for f in files if str(f) == path]
    spec = importlib.util.spec_from_file_location(name, file.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
