"""An interactive planner for notebooks: rank, slots and parallelism above, the footprint below. Needs ipywidgets."""

from __future__ import annotations

import html
from typing import Any

from lora_mem.errors import SizingError
from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.options import MAX_LORA_RANKS, MOE_BACKENDS, STRATEGIES
from lora_mem.sizing.shapes import known_models


def planner(model: str = "Qwen/Qwen3-30B-A3B", *, rank: int = 64) -> Any:
    """A box of widgets that shows the footprint of what is chosen, and the reason where vLLM would refuse it.

    Every known model can be chosen, and any other name or path typed. The last result is the box's `result` (a
    `Footprint`, or None while the choice cannot be sized). Plain widgets only: no kernel extension beyond ipywidgets.
    """
    import ipywidgets as widgets

    choose = {
        "model": widgets.Combobox(value=model, options=list(known_models()), description="model", ensure_option=False),
        "rank": widgets.IntText(value=rank, description="rank"),
        "target_modules": widgets.Text(value="all-linear", description="targets"),
        # Not None for what vLLM or the checkpoint decides: a Dropdown takes that for no choice.
        "max_lora_rank": widgets.Dropdown(
            options=[("smallest", 0), *((str(value), value) for value in MAX_LORA_RANKS)], description="max_lora_rank"
        ),
        "max_loras": widgets.IntSlider(value=1, min=1, max=32, description="max_loras"),
        "max_cpu_loras": widgets.IntSlider(value=1, min=1, max=128, description="max_cpu_loras"),
        "tensor_parallel_size": widgets.Dropdown(options=[1, 2, 4, 8, 16], value=1, description="TP"),
        "enable_expert_parallel": widgets.Checkbox(value=False, description="expert parallel"),
        "fully_sharded_loras": widgets.Checkbox(value=False, description="fully sharded"),
        "moe_backend": widgets.Dropdown(
            options=[("the checkpoint's", ""), *((name, name) for name in MOE_BACKENDS)], description="MoE backend"
        ),
        "strategy": widgets.Dropdown(options=list(STRATEGIES), value="stage", description="strategy"),
    }
    for widget in choose.values():
        widget.style.description_width = "8rem"
        widget.layout.width = "26rem"
    output = widgets.HTML()
    box = widgets.VBox([widgets.VBox(list(choose.values())), output])
    box.result = None

    def show(_change: Any = None) -> None:
        chosen = {name: widget.value for name, widget in choose.items()}
        names = [name.strip() for name in chosen.pop("target_modules").split(",")]
        targets = names[0] if len(names) == 1 else names
        chosen |= {name: chosen[name] or None for name in ("max_lora_rank", "moe_backend")}
        # More slots than registered adapters is nothing that vLLM takes: the lower slider follows.
        chosen["max_cpu_loras"] = max(chosen["max_cpu_loras"], chosen["max_loras"])
        try:
            box.result = footprint(chosen.pop("model"), target_modules=targets, **chosen)
            output.value = box.result._repr_html_()
        except SizingError as error:
            box.result = None
            output.value = f"<p><b>{html.escape(str(error))}</b></p>"

    for widget in choose.values():
        widget.observe(show, names="value")
    box.choose = choose
    show()
    return box
