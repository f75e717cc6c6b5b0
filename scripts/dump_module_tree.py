#!/usr/bin/env python3
"""Dumps the module tree of a PyTorch model to the JSON that `structures discover --tree` reads.

    scripts/dump_module_tree.py --hf DIRECTORY_OR_NAME -o tree.json.gz
    scripts/dump_module_tree.py --make my_package.my_module:make_model -o tree.json

Whoever wants to know which seams a model has before porting it needs nothing else: no weight is written, and with
`--hf` none is read (the model is built on the meta device from its configuration). `--make` calls a function without
arguments that returns a `torch.nn.Module`. From Python: `dump(model, "name")` gives the same as a dictionary.

The document: `modules` in definition order with `path`, `class`, `params` {name: [shape, dtype]}, `absent_params`
(registered as None), `buffers` {name: [shape, dtype, persistent]}, `attrs` (scalars and short tuples), `activation`
where a module holds one under a name in use; `classes` with the forward parameters and base classes of each;
`module_aliases` (second names of shared modules), `tied_parameters`, `parameter_count`.
"""
import argparse
import functools
import gzip
import importlib
import inspect
import json
import math
import sys

ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "pos",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "arg",
    inspect.Parameter.VAR_POSITIONAL: "var",
    inspect.Parameter.KEYWORD_ONLY: "kw",
    inspect.Parameter.VAR_KEYWORD: "varkw",
}


def scalar(value):
    """Whether JSON can hold it as it is; no NaN and no infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def attributes(module):
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if scalar(value):
            found[name] = value
        elif isinstance(value, (tuple, list)) and len(value) <= 8 and all(scalar(v) for v in value):
            found[name] = list(value)
    return found


def activation(module):
    """What stands under the first of the usual names: a module, a function, a partial of one, or a text."""
    import torch

    for name in ACTIVATIONS:
        value = getattr(module, name, None)
        if value is None:
            continue
        out = {"attr": name, "class": type(value).__name__, "name": None}
        if isinstance(value, str):
            out["value"] = value
        elif isinstance(value, functools.partial):
            out["name"] = getattr(value.func, "__name__", None)
            out["keywords"] = {k: v for k, v in value.keywords.items() if scalar(v)}
        elif not isinstance(value, torch.nn.Module):
            if not callable(value):
                continue
            out["name"] = getattr(value, "__name__", None)
        return out
    return None


def described(cls):
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        forward = [[p.name, KINDS[p.kind]] for p in parameters]
    except (TypeError, ValueError):
        forward = None
    bases = [b.__name__ for b in cls.__mro__[1:] if b.__name__ not in ("Module", "object")]
    return {"forward": forward, "bases": bases}


def typed(tensor):
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def dump(model, name):
    """The tree as a dictionary."""
    first, aliases, modules, classes = {}, {}, [], {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            # A name below a second name follows from it.
            parent = path.rpartition(".")[0]
            if parent not in aliases and not any(parent.startswith(a + ".") for a in aliases):
                aliases[path] = first[id(module)]
            continue
        first[id(module)] = path
        parameters = module._parameters
        entry = {
            "path": path,
            "class": type(module).__name__,
            "params": {n: typed(p) for n, p in parameters.items() if p is not None},
            "absent_params": [n for n, p in parameters.items() if p is None],
            "buffers": {
                n: typed(b) + [n not in module._non_persistent_buffers_set]
                for n, b in module._buffers.items()
                if b is not None
            },
            "attrs": attributes(module),
        }
        if found := activation(module):
            entry["activation"] = found
        modules.append(entry)
        classes.setdefault(type(module).__name__, described(type(module)))
    # A parameter that several modules hold is tied; a shared module has its own once.
    holders, count = {}, 0
    for path, module in model.named_modules():
        for n, parameter in module._parameters.items():
            if parameter is not None:
                known = holders.setdefault(id(parameter), [])
                known.append(f"{path}.{n}" if path else n)
                count += parameter.numel() if len(known) == 1 else 0
    return {
        "model": name,
        "modules": modules,
        "classes": classes,
        "module_aliases": aliases,
        "tied_parameters": [group for group in holders.values() if len(group) > 1],
        "parameter_count": count,
    }


def from_hub(name):
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(name)
    architecture = (config.architectures or [None])[0]
    cls = getattr(transformers, architecture or "", None)
    dtype = getattr(config, "dtype", None)
    before = torch.get_default_dtype()
    # Parameters have the type that the configuration names, as when a checkpoint is loaded.
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return cls(config) if cls is not None else transformers.AutoModel.from_config(config)
    finally:
        torch.set_default_dtype(before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", metavar="NAME", help="a directory with config.json, or a name transformers knows")
    source.add_argument("--make", metavar="MODULE:FUNCTION", help="a function that returns a torch.nn.Module")
    parser.add_argument("-o", "--output", required=True, help="*.json, or *.json.gz for gzip")
    args = parser.parse_args()
    if args.hf:
        name, model = args.hf.rstrip("/").rpartition("/")[2], from_hub(args.hf)
    else:
        module, _, function = args.make.partition(":")
        sys.path.insert(0, "")
        name, model = function, getattr(importlib.import_module(module), function)()
    text = json.dumps(dump(model, name), allow_nan=False, separators=(",", ":"))
    opened = gzip.open if args.output.endswith(".gz") else open
    with opened(args.output, "wt", encoding="utf-8") as f:
        f.write(text)
    print(f"{args.output}: {name}, read it with `structures discover --tree {args.output}`", file=sys.stderr)


if __name__ == "__main__":
    main()
