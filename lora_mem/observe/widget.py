"""An interactive planner for notebooks: every option above, the footprint below. Needs ipywidgets."""

from __future__ import annotations

import html
from typing import Any

from lora_mem.errors import SizingError
from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.options import OPTIONS, Option
from lora_mem.sizing.shapes import known_models


def planner(model: str = "Qwen/Qwen3-30B-A3B", *, rank: int = 64) -> Any:
    """A box of widgets that shows the footprint of what is chosen, and the reason where vLLM would refuse it.

    Every known model can be chosen, and any other name or path typed; what is left empty is the default. The box has
    its widgets by name as `choose`, and the last result as `result` (a `Footprint`, or None while the choice cannot be
    sized). Plain widgets only: no kernel extension beyond ipywidgets.
    """
    import ipywidgets as widgets

    layout = widgets.Layout(width="30rem")  # one for all: a notebook keeps the state of each
    choose = {"model": widgets.Combobox(value=model, options=list(known_models()), layout=layout)}
    choose |= {name: _widget(option, layout) for name, option in OPTIONS.items()}
    choose["rank"].value = rank
    for name, widget in choose.items():
        widget.description = name
        widget.style.description_width = "16rem"
    output = widgets.HTML()
    box = widgets.VBox([widgets.Box(list(choose.values()), layout={"flex_flow": "row wrap"}), output])
    box.choose, box.result = choose, None

    def show(_change: Any = None) -> None:
        chosen = {name: _chosen(option, choose[name].value) for name, option in OPTIONS.items()}
        try:
            box.result = footprint(choose["model"].value, **chosen)
            output.value = box.result._repr_html_()
        except SizingError as error:
            box.result = None
            output.value = f"<p><b>{html.escape(str(error))}</b></p>"

    for widget in choose.values():
        widget.observe(show, names="value")
    show()
    return box


def _widget(option: Option, layout: Any) -> Any:
    import ipywidgets as widgets

    look = {"layout": layout, "tooltip": option.help}
    if option.type is bool and option.default is not None:
        return widgets.Checkbox(value=option.default, indent=True, **look)
    if option.choices or option.type is bool:
        choices = [(str(choice), choice) for choice in option.choices or (True, False)]
        # Not None for what is left to the model or vLLM: a Dropdown takes that for no choice.
        default = [("default", "")] if option.default is None else []
        return widgets.Dropdown(options=default + choices, value=option.default or "", **look)
    if option.type is int and option.default is not None:
        return widgets.IntText(value=option.default if isinstance(option.default, int) else 1, **look)
    return widgets.Text(value=option.default or "", placeholder="default", continuous_update=False, **look)


def _chosen(option: Option, value: Any) -> Any:
    """A widget's value as the option takes it; what is not a number is left to the option's check to refuse."""
    if value == "":
        return option.default
    if not isinstance(value, str) or option.choices:
        return value
    try:
        return option.read(value) if option.type is str else option.type(value)
    except ValueError:
        return value
