"""`meshwright generate`: text from the last checkpoint of a run."""

from __future__ import annotations

import dataclasses
import json as json_lib
import sys
from typing import Literal

from meshwright.bounded_reader import read_text
from meshwright.cli import require_one_process, simulate_devices
from meshwright.errors import ConfigError, DataError, FileFormatError


def generate(
    run: str,
    prompt: tuple[str, ...] = (),
    prompt_file: str | None = None,
    max_tokens: int = 128,
    temperature: float = 0.7,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    ignore_end: bool = False,
    step: int | None = None,
    mesh: str | None = None,
    devices: int | None = None,
    weights: Literal["auto", "ema", "last"] = "auto",
    precision: Literal["auto", "float32", "mixed", "bfloat16"] = "auto",
    stream: bool = True,
    json: bool = False,
) -> int:
    """Generate text with the model of a run, from its last good checkpoint.

    Text goes to stdout as it is generated; with several prompts, after the last one is finished. Meshes and batches
    give the same text up to rounding.

    Args:
        run: run folder, or its URL in an object store.
        prompt: one or more texts to continue; an empty one starts a document (default: one empty prompt).
        prompt_file: file of prompts, one per line; - for stdin.
        max_tokens: maximum number of new tokens per prompt.
        temperature: sampling temperature; 0 always takes the most likely token.
        top_k: draw only from this many of the most likely tokens.
        top_p: draw only from the most likely tokens that reach this probability together.
        seed: seed of the random numbers.
        stop: strings that end a text; it ends before them.
        ignore_end: continue after the end of a document.
        step: step of the checkpoint (default: the last good one).
        mesh: mesh such as tp:4 (default: all accelerators that can split the heads; one CPU device).
        devices: number of devices to use; without accelerators, to simulate (default: 8 with --mesh, else 1).
        weights: ema, the moving average that a run with --ema keeps; last, the parameters themselves; auto, the average
            if there is one.
        precision: compute precision; auto is float32 on CPUs and mixed elsewhere.
        stream: show the text of a single prompt while it is generated.
        json: print a JSON list with a prompt, its text, tokens and reason for ending per item.
    """
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1; got {max_tokens}.", hint="pass e.g. --max-tokens 128.")
    if devices is not None and devices < 1:
        raise ConfigError(f"--devices must be at least 1; got {devices}.", hint="pass e.g. --devices 8.")
    require_one_process("generate")
    simulate_devices(devices or (1 if mesh is None else 8))
    from meshwright.generate.draw import Sampling
    from meshwright.generate.generator import make_generator
    from meshwright.generate.limits import check_prompts, check_room
    from meshwright.generate.spread import Spread
    from meshwright.generate.text import encode_prompts, generate_text
    from meshwright.loop.results.sample import printable
    from meshwright.loop.results.saved_run import mesh_to_use, open_run, precision_to_use

    prompts = _prompts(prompt, prompt_file)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    saved = open_run(run, step=step)
    encoded = encode_prompts(prompts, saved.tokenizer)
    length = max(map(len, encoded)) + max_tokens
    generator = make_generator(
        saved.model, length=length, precision=precision_to_use(precision), vocab_size=saved.tokenizer.vocab_size
    )
    # Refuse wrong prompts and absurd lengths before reading any parameter.
    check_prompts(encoded, max_tokens, length, saved.model.vocab_size)
    placed = mesh_to_use(saved.model, mesh, devices=devices)
    check_room(saved.model, len(encoded), length, generator.precision, Spread.of(placed, len(encoded)))
    if length > saved.config.data.num_tokens:
        _tell(f"texts may get {length} tokens long; the model was trained on rows of {saved.config.data.num_tokens}")
    params, found, notes = saved.restore(placed, weights=weights)
    for note in notes:
        _tell(note)
    _tell(f"step {found} of {run}, on {', '.join(f'{axis}:{size}' for axis, size in placed.shape.items())}")
    loaded = generator.load(params, num_rows=len(encoded))
    del params
    shows = stream and not json and len(prompts) == 1

    def show(_: int, text: str) -> None:
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)

    if shows:
        show(0, prompts[0])
    results = generate_text(
        generator,
        loaded,
        saved.tokenizer,
        prompts,
        max_tokens,
        sampling=sampling,
        stop=stop,
        ignore_end=ignore_end,
        on_text=show if shows else None,
    )
    if json:
        print(json_lib.dumps([dataclasses.asdict(result) for result in results], indent=1))
    elif shows:
        print()
    else:
        for number, result in enumerate(results):
            if len(results) > 1:
                print(f"--- {number + 1} of {len(results)} (ended by {result.why})")
            show(number, result.prompt + result.text)
            print()
    return 0


def _prompts(given: tuple[str, ...], file: str | None) -> list[str]:
    if given and file is not None:
        raise ConfigError("both --prompt and --prompt-file are given.", hint="use one of them.")
    if file is None:
        return list(given) or [""]
    try:
        text = sys.stdin.read() if file == "-" else read_text(file)
    except (OSError, UnicodeDecodeError, FileFormatError) as error:
        raise DataError(
            f"cannot read the prompts in {file}: {str(error).rstrip('.')}.", hint="pass a text file, or -."
        ) from None
    lines = text.splitlines()
    if not lines:
        raise DataError(f"{file} holds no prompts.", hint="write one prompt per line.")
    return lines


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
