"""Published runs: the table itself, and plans of those that are quick to trace."""

from collections import Counter

from meshwright.hardware.chips import chip_of
from meshwright.plan.published import published_runs

QUICK = ("mpt-1b", "llama3-8b", "maxtext-32b")


def test_the_table_covers_the_chips_and_holds_out_half():
    runs = published_runs()
    count = Counter(run.chip for run in runs)
    assert len(runs) >= 30
    assert set(count) == {"a100", "h100", "h200", "v4", "v5e", "v5p", "v6e"}
    for chip in count:
        halves = [run.half for run in runs if run.chip == chip and not run.compared]
        alternate = ["fitted", "held out"] if chip_of(chip).rates.is_fitted else ["held out"]
        assert halves == (alternate * len(halves))[: len(halves)]
    assert len({(run.name, run.target, run.mesh, run.rows, run.tokens) for run in runs}) == len(runs)


def test_runs_that_do_not_test_the_rates_are_only_compared():
    compared = Counter((run.chip, run.half) for run in published_runs() if run.compared)
    assert compared == {
        ("h100", "compared: pipeline"): 6,
        ("h100", "compared: tp on GPUs"): 3,
        ("h100", "compared: superseded"): 1,
        ("h200", "compared: tp on GPUs"): 15,
    }


def test_models_have_their_published_number_of_parameters():
    billions = {"b": 1.0, "m": 1e-3}
    for run in published_runs():
        size = run.name.rpartition("-")[2]
        published = float(size[:-1]) * billions[size[-1]]
        # Names round: MPT-1b has 1.3 billion, MPT-70b 64.9, MaxText's 52B 58.8.
        assert 0.85 < run.model.num_params / 1e9 / published < 1.35, run.name


def test_plans_are_within_the_stated_error_of_published_throughput():
    profiles, checked = {}, Counter()
    for run in published_runs():
        chosen = run.chip in ("v5p", "v6e", "v5e") or run.name == "mpt-1b" or run.target == "h200:1x4"
        if run.name in QUICK and chosen and not run.compared:
            plan = run.plan(profiles)
            each = [rate / plan.target.num_devices for rate in plan.tokens_per_second_band]
            assert each[0] <= run.tokens_per_second <= each[1], (run.name, run.target)
            assert plan.time.error == chip_of(run.chip).rates.error
            checked[run.chip] += 1
    assert checked == {"a100": 1, "h100": 2, "h200": 1, "v5e": 2, "v5p": 2, "v6e": 3}
