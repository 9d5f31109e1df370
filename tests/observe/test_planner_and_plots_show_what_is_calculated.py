"""The widget planner and the plots of footprints show the calculator's figures."""

import pytest

from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.options import OPTIONS, STRATEGIES

GIB = 1024**3


QWEN = "Qwen/Qwen3-30B-A3B"


def test_plots_take_and_return_axes() -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    from matplotlib.figure import Figure

    from lora_mem.observe.plots import plot_holders, plot_phases, plot_rank_by_tp

    result = footprint(QWEN, rank=64, strategy="keep")
    given = Figure().add_subplot()
    assert plot_phases(result, ax=given) is given
    heights = [patch.get_height() for patch in given.patches]
    assert sum(heights[i] for i in (1, 5)) == pytest.approx(result.gpu_sync_peak_bytes / GIB)
    holders = plot_holders({strategy: footprint(QWEN, rank=64, strategy=strategy) for strategy in STRATEGIES})
    bars = [holders.patches[place::3] for place in range(3)]
    assert sum(bar.get_height() for bar in bars[0]) == pytest.approx(result.gpu_resident_bytes / GIB)
    assert [bool(bar.get_hatch()) for bar in bars[0]] == [False, False, False]
    for strategy, drawn in zip(STRATEGIES[1:], bars[1:], strict=True):
        on_host = sum(bar.get_height() for bar in drawn if bar.get_hatch())
        assert on_host == pytest.approx(footprint(QWEN, rank=64, strategy=strategy).host_bytes / GIB)
    heat = plot_rank_by_tp(QWEN, ranks=(8, 64), tensor_parallel_sizes=(1, 3))
    texts = [text.get_text() for text in heat.texts]
    assert texts == [f"{footprint(QWEN, rank=rank).slot_bytes / GIB:.2f}" for rank in (8, 64)]
    assert result.plot().get_title() == f"{QWEN} (keep)"


def test_the_interactive_planner_follows_its_widgets() -> None:
    pytest.importorskip("ipywidgets")
    from lora_mem.observe.widget import planner

    box = planner(QWEN, rank=64)
    assert box.result.slot_bytes == footprint(QWEN, rank=64).slot_bytes
    box.choose["max_loras"].value = 4
    box.choose["tensor_parallel_size"].value = 2
    expected = footprint(QWEN, rank=64, max_loras=4, tensor_parallel_size=2)
    assert box.result.slot_bytes == expected.slot_bytes
    assert f"{expected.slot_bytes:,}" in box.children[1].value
    box.choose["max_lora_rank"].value = 128
    expected = footprint(QWEN, rank=64, max_loras=4, tensor_parallel_size=2, max_lora_rank=128)
    assert box.result.slot_bytes == expected.slot_bytes
    box.choose["moe_backend"].value = "triton"
    assert box.result.slot_bytes == expected.slot_bytes
    assert all(widget.value is not None for widget in box.choose.values())
    box.choose["rank"].value = 0
    assert box.result is None
    assert "rank=0" in box.children[1].value
    box.choose["rank"].value = 16
    box.choose["model"].value = "openai/gpt-oss-20b"
    box.choose["moe_backend"].value = ""
    assert "assumed: moe_backend=triton" in box.children[1].value
    box.choose["moe_backend"].value = "mxfp4_marlin"
    assert box.result.slot_bytes
    assert box.choose.keys() == {"model", *OPTIONS}
    box.choose["model"].value = QWEN
    box.choose["max_cpu_loras"].value = "many"
    assert "max_cpu_loras=&#x27;many&#x27;: must be a whole number" in box.children[1].value
    box.choose["max_cpu_loras"].value = "8"
    assert box.result.registered_adapters == 8
    assert box.result.strategy == "stage"
    box.choose["target_modules"].value = "q_proj, o_proj"
    assert box.result.packed_bytes < expected.packed_bytes
    box.choose["target_modules"].value = ""
    assert box.result.options.target_modules == "all-linear"
