"""Run configurations: options in files and on the command line, and errors for invalid ones."""

import math

import pytest

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.settings.config import TrainConfig, read_config
from meshwright.loop.settings.presets import PRESETS, preset
from meshwright.train import Fp8, Precision


def test_a_written_configuration_reads_back_equal(tmp_path):
    config = preset("smoke").changed(
        {"mesh": "dp:2,tp:2", "learning_rate": 1e-5, "model_options": ["num_layers=3"], "clip": None, "prompt": "é: #"}
    )
    (tmp_path / "c.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert read_config(tmp_path / "c.yaml") == config
    assert config.flat()["model_options"] == ["num_layers=3"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_change_only_the_options_they_list(name):
    changed, plain = preset(name).flat(), TrainConfig().flat()
    assert {key: value for key, value in changed.items() if value != plain[key]} == {
        key: value for key, value in PRESETS[name].items() if value != plain[key]
    }


def test_files_may_write_numbers_in_any_form(tmp_path):
    (tmp_path / "c.yaml").write_text("learning_rate: 3e-4\nclip: null\nweight_decay: 0\n")
    config = read_config(tmp_path / "c.yaml", base=preset("smoke"))
    assert (config.optimizer.learning_rate, config.optimizer.clip, config.optimizer.weight_decay) == (3e-4, None, 0.0)
    assert config.run.steps == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", r"no option `learning_rat`.\nhint: did you mean 'learning_rate'"),
        ("steps: 1.5", r"steps is 1.5.\nhint: use a whole number"),
        ("steps: true", r"steps is True.\nhint: use a whole number"),
        ("optimizer: adam", r"optimizer is 'adam'.\nhint: use one of adamw, muon, adafactor, lion, sgd"),
        ("learning_rate: fast", r"learning_rate is 'fast'.\nhint: use a number"),
        ("- steps", r"holds a list"),
        ("steps: [", r"is not YAML"),
        ("!!python/object/apply:os.system [ls]", r"is not YAML"),
    ],
)
def test_wrong_files_are_errors(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("steps", 0), ("steps", -5), ("learning_rate", math.nan), ("learning_rate", -1e-3), ("learning_rate", math.inf),
        ("weight_decay", -0.1), ("beta2", 1.0), ("warmup", -1), ("clip", 0.0), ("clip", math.nan), ("batch_size", 0),
        ("num_tokens", -1), ("validation", 1.0), ("validation", -0.1), ("minibatches", 0), ("devices", 0),
        ("checkpoint_every", -1), ("keep_last", 0), ("rollback", 0.0), ("hang", -1.0), ("max_skipped", 0),
        ("process_id", -1), ("epochs", 0), ("seed", -1),
    ],
)  # fmt: skip
def test_invalid_values_are_rejected_by_name(option, value):
    with pytest.raises(ConfigError, match=f"{option}=.* is out of range"):
        TrainConfig().changed({option: value})


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        read_config(tmp_path / "none.yaml")


def test_an_unknown_preset_gets_a_spelling_hint():
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        preset("smok")


def test_a_duplicate_key_is_rejected(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nbatch_size: 8\nsteps: 9\n")
    with pytest.raises(ConfigError, match=r"gives `steps` twice, in lines 1 and 3.\nhint: leave one of them out"):
        read_config(file)


@pytest.mark.parametrize("name", ["steps", "batch_size", "warmup", "keep_last", "process_id"])
def test_too_large_numbers_are_rejected(tmp_path, name):
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: 99999999999999999999999\n")
    with pytest.raises(ConfigError, match=rf"{name}=9+ is out of range.\nhint: use a whole number below 2\*\*31"):
        read_config(file)
    file.write_text(f"learning_rate: 1{'0' * 400}\n")
    with pytest.raises(ConfigError, match="use a number"):
        read_config(file)


@pytest.mark.parametrize("name", ["data", "run", "data_cache", "tokenizer", "job"])
def test_empty_strings_are_rejected(name):
    for value in ("", " "):
        with pytest.raises(ConfigError, match=f"{name} is empty.\nhint: .* is a shell variable unset"):
            TrainConfig().changed({name: value})


@pytest.mark.parametrize("name", ["local_run", "data_cache", "init_adapters", "job"])
def test_urls_are_rejected_instead_of_creating_a_folder_of_that_name(name):
    with pytest.raises(ConfigError, match=f"{name}=gs://bucket/x is a URL; only --run, --data, --init-from"):
        TrainConfig().changed({name: "gs://bucket/x"})


def test_adapters_do_not_run_in_fp8():
    with pytest.raises(ConfigError, match=r"adapters do not run in fp8.\nhint: use --precision mixed"):
        TrainConfig().changed({"lora": "rank=4", "precision": "fp8"})


def test_options_for_fp8_need_it():
    config = TrainConfig().changed({"precision": "fp8", "fp8_scaling": "current", "fp8_matmuls": "mlp/up$"})
    assert config.dtypes("fp8").fp8 == Fp8(matmuls="mlp/up$", scaling="current")
    for precision in ("auto", "mixed"):
        with pytest.raises(MeshwrightError, match=r"--fp8-least-dim has no effect without --precision fp8.\nhint: add"):
            TrainConfig().changed({"precision": precision, "fp8_least_dim": 16})
    with pytest.raises(MeshwrightError, match="least_dim must be a positive integer; got 0"):
        TrainConfig().changed({"precision": "fp8", "fp8_least_dim": 0})
    assert TrainConfig().changed({"precision": "fp8"}).dtypes("fp8") == Precision.named("fp8")
