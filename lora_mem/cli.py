"""The command line. `size`, `plan` and `report` need neither torch nor vllm."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lora_mem.errors import SizingError
from lora_mem.sizing.options import OPTIONS, REQUIRED, Option
from lora_mem.sizing.units import gib
from lora_mem.version import __version__

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="The memory of LoRA adapters in vLLM."
)

WIDE = 110
"""Characters from which a table has room for a column of words."""

Model = Annotated[str, typer.Argument(help="A hub name, or a path to a config.json.")]
Why = Annotated[bool, typer.Option("--why", help="Each figure with its formula and inputs; --json has them always.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes per worker, as integers.")]


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every option of `lora_mem.Options` on its command line; it gets those that were given."""

    def run(**arguments: Any) -> None:
        options = {name: arguments.pop(name) for name in OPTIONS}
        given = {name: value for name, value in options.items() if value is not None}
        read = {name: OPTIONS[name].read(value) for name, value in given.items() if isinstance(value, str)}
        command(**arguments, **given | read)

    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.kind != one.VAR_KEYWORD]
    run.__signature__ = inspect.Signature([*own, *map(_parameter, OPTIONS.values())])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameter(option: Option) -> inspect.Parameter:
    """An option of the calculator as Typer takes it, by its short flag and by vLLM's or PEFT's name."""
    flag = f"--{option.name.replace('_', '-')}"
    if option.type is bool and option.default is None:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    flags = (flag,) if option.flag in flag.split("/") else (option.flag, flag)
    choices = f" One of {', '.join(map(str, option.choices))}." if option.choices else ""
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.default is REQUIRED else option.default,
        annotation=Annotated[option.type | None, typer.Option(*flags, help=option.help + choices)],
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lora-mem {__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


@app.callback()
def _root(version: _Version = False) -> None:
    """The memory of LoRA adapters in vLLM."""


@app.command()
@_with_options
def size(
    *,
    model: Model,
    phases: Annotated[bool, typer.Option("--phases", help="The GPU phase by phase of a colocated run.")] = False,
    why: Why = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """The bytes of each holder of an adapter, per worker."""
    from lora_mem.sizing.footprints import footprint

    result = footprint(model, **options)
    _say_assumed(result.assumes)
    title = f"{result.model}, rank {options['rank']}, {result.strategy}"
    if as_json:
        _print_json(result)
    elif phases:
        held = {phase: [*sizes.values()] for phase, sizes in result.phases().items()}
        rows = [[phase, *(f"{size:,}" for size in sizes), gib(sum(sizes))] for phase, sizes in held.items()]
        _print_table(title, ("phase", "slots", "adapters", "all"), rows, plain=True)
    elif why:
        print("\n\n".join(result.why(line.name) for line in result.lines))
    else:
        rows = [
            [line.name, f"{line.bytes:,}", f"{line.bytes / 2**30:.4f}", _first_sentence(line.meaning)]
            for line in result.lines
        ]
        _print_table(f"{title}, per worker", ("figure", "bytes", "GiB", "what it is"), rows)


@app.command()
@_with_options
def plan(
    *,
    model: Model,
    gpu: Annotated[str, typer.Option(help="The GPU's memory in GiB, or its name, e.g. H200.")],
    weights: Annotated[float, typer.Option(help="The model's weights in one worker, GiB.")],
    kv_cache: Annotated[float, typer.Option(help="KV cache and other room to leave in one worker, GiB.")] = 0.0,
    host: Annotated[float | None, typer.Option(help="Host memory of a node for adapters, GiB.")] = None,
    why: Why = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Does it fit, how far could it go, what would save memory.

    Exit code 0: fits, 1: does not, 2: cannot tell.
    """
    from lora_mem.sizing.planning import plan as make_plan

    result = make_plan(
        model,
        gpu_bytes=_gpu(gpu),
        weights_bytes=_gib("weights", weights),
        kv_cache_bytes=_gib("kv_cache", kv_cache),
        host_memory_bytes=None if host is None else _gib("host", host),
        **options,
    )
    _say_assumed(result.footprint.assumes)
    if as_json:
        _print_json(result)
    elif why:
        print("\n".join(result.why(answer.question) for answer in result.answers))
    else:
        title = f"{result.footprint.model}, rank {options['rank']}: {'fits' if result.fits else 'does not fit'}"
        rows = [(answer.words, answer.text(), answer.formula) for answer in result.answers]
        _print_table(title, ("question", "answer", "formula"), rows)
    raise typer.Exit(0 if result.fits else 1)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="tiny, a built-in model's name, or a path to a config.json.")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Cut the model to so many layers.")] = None,
    rank: Annotated[int, typer.Option(help=OPTIONS["rank"].help)] = 64,
    strategy: Annotated[str, typer.Option(help="keep, offload, stage, fill (stage with fill_slot), or all.")] = "all",
    syncs: Annotated[int, typer.Option(help="Versions of the adapter, 2 or more.")] = 2,
    repeats: Annotated[int, typer.Option(help="So many more syncs by stage and fill, to see that nothing grows.")] = 0,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM's; room must be left for two adapters.")] = 0.62,
    as_json: AsJson = False,
) -> None:
    """The strategies side by side in a real vLLM engine here.

    Seconds and bytes of each sync, with dummy weights.

    Exit code 0: tokens and slots are equal, 1: they differ, 2: nothing was run.
    """
    from lora_mem import bench as benches
    from lora_mem.testing import engine_config

    if strategy not in (*benches.WAYS, "all"):
        raise SizingError("strategy", strategy, f"must be one of {', '.join(benches.WAYS)}, all")
    if not 1 <= rank <= 512:
        raise SizingError("rank", rank, "must be 1 to 512, the largest that vLLM takes")
    benches.check_syncs(syncs)
    config = engine_config(model, layers)
    llm = benches.start(config, max_rank=rank, gpu_memory_utilization=gpu_memory_utilization)
    ways = tuple(way for way in benches.WAYS if strategy in (way, "all"))
    result = benches.run(llm, config, model=model, rank=rank, strategies=ways, syncs=syncs, repeats=repeats)
    if as_json:
        _print_json(result)
    else:
        title, columns, rows = result.table()
        print(title)
        _print_table("", columns, rows, plain=True)
        tokens = {True: "tokens equal", False: "TOKENS DIFFER", None: "no tokens to compare"}
        print(tokens[result.tokens_equal], "slots equal" if result.slots_equal else "SLOTS DIFFER", sep="\n")
    if not result.syncs:
        _fail("nothing was run: " + "; ".join(f"{way}: {why}" for way, why in result.skipped.items()))
    raise typer.Exit(0 if result.tokens_equal is not False and result.slots_equal else 1)


@app.command()
def demo() -> None:
    """An adapter's life in a real vLLM engine on this machine."""
    from lora_mem.demo import main as run

    raise typer.Exit(run())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What is installed, what fits, what this machine can do.

    Exit code 1: something is bad.
    """
    from rich.console import Console
    from rich.markup import escape

    from lora_mem import doctor as doctors

    console = Console(highlight=False)
    found = []
    for check in doctors.checks():
        found.append(check)
        if not as_json:
            colour = {"ok": "green", "warn": "yellow", "bad": "bold red"}[check.state]
            console.print(f"[{colour}]{check.state:<5}[/]{escape(check.name)}: {escape(check.found)}", soft_wrap=True)
            if check.advice:
                console.print(f"     -> {check.advice}", soft_wrap=True, markup=False)
    result = doctors.to_dict(found)
    if as_json:
        print(json.dumps(result, indent=2))
    raise typer.Exit(0 if result["ok"] else 1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A dated report: README.md, raw data, plots.")],
    output: Annotated[Path | None, typer.Option(help="The page; default the folder's name with .html, here.")] = None,
) -> None:
    """A report folder as one HTML page that needs nothing else."""
    from lora_mem.observe.report import ReportError, render

    try:
        page = render(folder)
    except (ReportError, ImportError) as error:
        _fail(str(error))
    output = output or Path(f"{folder.resolve().name}.html")
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SizingError("output", str(output), f"cannot be written ({error.strerror}); name a file") from None
    print(output)


def _gpu(text: str) -> int:
    from lora_mem.sizing.planning import GPUS

    for name, size in GPUS.items():
        if text.casefold() == name.casefold():
            return size
    try:
        return _gib("gpu", float(text))
    except ValueError:
        raise SizingError("gpu", text, f"must be a size in GiB or one of {', '.join(GPUS)}") from None


def _gib(name: str, value: float) -> int:
    if not 0 <= value < float("inf"):
        raise SizingError(name, value, "must be a size in GiB")
    return round(value * 1024**3)


def _say_assumed(assumed: str) -> None:
    if assumed:
        typer.echo(f"lora-mem: assumed: {assumed}", err=True)


def _print_json(result: Any) -> None:
    print(json.dumps(result.to_dict(), indent=2))


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].removesuffix(".")


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, plain: bool = False) -> None:
    """Print a table, without its last column of words where the terminal is too narrow for it.

    `plain` for many narrow columns of figures, which must fit 80 characters.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    narrow = not plain and console.width < WIDE
    style: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0)} if plain else {"box": box.HEAVY_HEAD}
    table = Table(title=title or None, caption="formulas: --why" if narrow else None, **style)
    if narrow:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    for index, column in enumerate(columns):
        numbers = column in ("bytes", "GiB") or (plain and index > 0)
        table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers or index == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _fail(message: str) -> NoReturn:
    print(f"lora-mem: {message}", file=sys.stderr)
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the `lora-mem` command; a wrong command line is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        # What the calculator refuses, and Typer's usage errors; anything else is a bug and keeps its traceback.
        message = str(error) if isinstance(error, SizingError) else getattr(error, "format_message", lambda: None)()
        if message is None:
            raise
        if text := " ".join(message.split()):
            print(f"lora-mem: {text}", file=sys.stderr)
        code = 2
    sys.exit(code or 0)
