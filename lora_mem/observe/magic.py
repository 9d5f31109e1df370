"""`%%lora_mem`: profile a notebook's cell by phase. Loaded with `%load_ext lora_mem`."""

from __future__ import annotations

import keyword
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from lora_mem.observe.profiler import profile
from lora_mem.observe.results import Profile


def register(shell: Any) -> None:
    """Add the magic to an IPython shell."""
    parser = MagicArgumentParser("%%lora_mem", description="Run a cell and show where time and memory went, by phase.")
    parser.add_argument("name", nargs="?", help="variable for the result; set too where the cell fails")
    parser.add_argument("--trace", help="write a trace of torch's profiler: a .json or .json.gz file, or a directory")
    parser.add_argument("--snapshot", help="write a snapshot of CUDA memory")
    parser.add_argument("--sample-every", type=float, metavar="SECONDS", help="sample memory too, for a timeline")

    def lora_mem(line: str, cell: str) -> Profile:
        options = parser.parse_argstring(line)
        if options.name and (not options.name.isidentifier() or keyword.iskeyword(options.name)):
            raise UsageError(f"name is {options.name!r}; it must be a name for a Python variable, such as `result`")
        source = shell.transform_cell(cell)
        # The event loop that would run it is the one that runs this magic.
        if shell.should_run_async(cell, transformed_cell=source):
            raise UsageError(
                "a cell of %%lora_mem cannot await: the magic itself runs in the notebook's event loop. Leave it out "
                "and put what awaits in `with lora_mem.profile() as profiler:`; then `profiler.result`"
            )
        profiler = profile(trace=options.trace, snapshot=options.snapshot, sample_every=options.sample_every)
        # Under a name by which a traceback finds the cell's lines.
        code = compile(source, shell.compile.cache(source), "exec", dont_inherit=True)
        try:
            with profiler:
                exec(code, shell.user_ns)
        finally:
            if options.name:
                shell.user_ns[options.name] = profiler.result
        return profiler.result

    lora_mem.__doc__ = f"""{parser.format_help()}
The parts of an adapter's load show by themselves; `with lora_mem.observe.profiler.phase("stage"):` marks your own.
"""
    shell.register_magic_function(lora_mem, magic_kind="cell", magic_name="lora_mem")
