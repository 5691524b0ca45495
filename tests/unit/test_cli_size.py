"""`headstart size`: what it prints, what it reads of a model's configuration, and what it refuses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.cli.model_config import kv_shape, notes, read_model
from gateway.cli.terminal import CliError
from latency.sizing import KvShape

GROUPED: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["size", *arguments])


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_shape_in_numbers_gives_the_kv_cache() -> None:
    shown = run("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--context", "20k", "--context", "128k")
    assert shown.exit_code == 0, shown.stderr
    assert "128 KiB per token" in shown.stdout
    assert "2.6 GB" in shown.stdout
    assert "17 GB" in shown.stdout


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (("1,000", "2000", "300"), ("0.50 s", "8.00 s", "94%", "160 English", "40 to 60 Korean")),
        (("12k", "1500", "500"), ("8.00 s", "20.50 s", "39%")),
    ],
)
def test_a_request_and_rates_give_its_times(load: tuple[str, str, str], said: tuple[str, ...]) -> None:
    prompt, prefill, output = load
    shown = run(
        "--prompt-tokens", prompt, "--prefill-rate", prefill, "--output-tokens", output, "--decode-rate", "40"
    )
    assert shown.exit_code == 0, shown.stderr
    for part in said:
        assert part in shown.stdout


def test_weights_and_bandwidth_give_the_ceiling_and_the_batch() -> None:
    shown = run("--weights", "8", "--bandwidth", "400", "--batch", "8")
    assert "50 tokens/s" in shown.stdout
    assert "8 tokens per pass of the weights" in shown.stdout


def test_ceilings_stand_in_for_rates_that_are_not_given_and_that_is_said() -> None:
    arguments = ("--parameters", "4B", "--bandwidth", "400", "--tflops", "100", "--prompt-tokens", "12500")
    shown = run(*arguments, "--output-tokens", "50")
    assert "Note: the answer's time takes the ceiling of decode and prefill" in shown.stdout
    answer = json.loads(run(*arguments, "--output-tokens", "50", "--json").stdout)["answer"]
    assert (answer["ttft_s"], answer["decode_s"]) == (1.0, 1.0)
    assert answer["from_ceilings"] == ["decode", "prefill"]


def test_a_model_folder_gives_shape_window_and_weights(tmp_path: Path) -> None:
    write(tmp_path, GROUPED)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
    told = json.loads(run(str(tmp_path), "--json", "--vram", "24").stdout)
    assert told["kv_bytes_per_token"] == 131_072
    assert [context["tokens"] for context in told["contexts"]] == [4_000, 20_000, 128_000, 131_072]
    assert told["weights_bytes"] == 1000
    assert told["contexts"][1]["conversations"] == 8
    quantised = json.loads(run(str(tmp_path / "config.json"), "--json", "--weight-bits", "4").stdout)
    assert quantised["weights_bytes"] == 250


def test_the_size_of_weights_that_are_not_there_is_read_from_their_index(tmp_path: Path) -> None:
    write(tmp_path, GROUPED)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 16060522496}}')
    assert read_model(tmp_path, 2).weights_bytes == 16_060_522_496


def test_heads_that_are_not_grouped_and_a_head_dim_that_is_missing_are_worked_out() -> None:
    config = {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
    assert kv_shape(config, 2) == KvShape(32, 32, 128)
    assert kv_shape({**GROUPED, "head_dim": 64}, 1) == KvShape(32, 8, 64, 1)
    assert kv_shape({"n_layer": 12, "n_head": 12, "n_embd": 768}, 2) == KvShape(12, 12, 64)
    assert kv_shape({**config, "multi_query": True}, 2) == KvShape(32, 1, 128)


def test_a_model_of_several_media_is_sized_by_its_text_part(tmp_path: Path) -> None:
    write(tmp_path, {"vision_config": {"num_hidden_layers": 99}, "text_config": GROUPED})
    assert read_model(tmp_path, 2).shape == KvShape(32, 8, 128)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "state of fixed size"),
        ({"model_type": "mamba2"}, "state of fixed size"),
    ],
)
def test_models_that_keep_something_else_are_refused_with_a_way_out(
    tmp_path: Path, extra: Mapping[str, Any], reason: str
) -> None:
    write(tmp_path, {**GROUPED, **extra})
    refused = run(str(tmp_path))
    assert refused.exit_code == 2
    assert reason in refused.stderr
    assert "--kv-bytes-per-token" in refused.stderr
    assert run(str(tmp_path), "--kv-bytes-per-token", "70272").exit_code == 0


def test_sliding_windows_are_said_to_make_an_upper_bound() -> None:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    assert "2 of 3 layers keep the last 1,024 tokens" in notes({"sliding_window": 1024, "layer_types": layers})[0]
    assert "its layers keep the last 4,096 tokens" in notes({"sliding_window": 4096})[0]
    assert notes({"sliding_window": 4096, "use_sliding_window": False}) == ()
    assert notes({"sliding_window": None}) == ()
    assert notes({"sliding_window": 4096, "layer_types": ["full_attention"]}) == ()


def test_a_mixture_of_experts_is_said_to_be_faster_than_computed() -> None:
    assert "Mixture of experts" in notes({"num_local_experts": 8})[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "Nothing can be worked out"),
        (("--layers", "32"), "--kv-heads is missing"),
        (("--layers", "3.5", "--kv-heads", "8", "--head-dim", "128"), "--layers: 3.5 is not a whole number"),
        (("--layers", "0"), "--layers"),
        (("--layers", "-4"), "--layers"),
        (("--kv-bits", "nan"), "--kv-bits"),
        (("--bandwidth", "inf", "--weights", "8"), "--bandwidth"),
        (("--bandwidth", "fast", "--weights", "8"), "--bandwidth: 'fast' is not a number"),
        (("--bandwidth", "400"), "--bandwidth needs --weights or --parameters"),
        (("--batch", "8"), "--batch needs --bandwidth"),
        (("--vram", "24"), "--vram needs"),
        (("--vram-share", "1.2", "--weights", "8"), "--vram-share"),
        (("--tflops", "100"), "--tflops needs --parameters"),
        (("--weight-bits", "4"), "--weight-bits needs --parameters"),
        (("--prompt-tokens", "100"), "--prompt-tokens needs --output-tokens"),
        (("--output-tokens", "100"), "--output-tokens needs --prompt-tokens"),
        (("--prompt-tokens", "9", "--output-tokens", "9"), "--prompt-tokens needs --prefill-rate"),
        (
            ("--prompt-tokens", "9", "--output-tokens", "9", "--prefill-rate", "9"),
            "--output-tokens needs --decode-rate",
        ),
        (("--prefill-rate", "100"), "--prefill-rate needs --prompt-tokens"),
        (("no/such/model",), "MODEL: no file 'no/such/model'"),
    ],
)
def test_what_is_wrong_or_missing_is_named_with_status_2(arguments: tuple[str, ...], named: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2, refused.stdout
    assert named in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "has no num_hidden_layers"),
        ('{"num_hidden_layers": true}', "num_hidden_layers is True"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 100}', "not shared evenly"),
    ],
)
def test_a_configuration_that_is_broken_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CliError, match=said) as refused:
        read_model(tmp_path, 2)
    assert refused.value.exit_code == 2
