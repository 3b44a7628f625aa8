"""`meshwright rules`: the layout of a job's parameters on a mesh, without allocating anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import jax
import tyro

from meshwright.cli import show
from meshwright.errors import JobError
from meshwright.layout import Layout, explain_layout
from meshwright.mesh.build import create_abstract_mesh
from meshwright.train.job import abstract_init, check_axes
from meshwright.train.jobs.job_loading import job_errors, load_job


def rules(
    job: Annotated[str, tyro.conf.Positional],
    /,
    mesh: str | None = None,
    num_devices: int | None = None,
    pad: tuple[str, ...] = (),
    all: bool = False,
    json: bool = False,
    picture: str = "",
    svg: Path | None = None,
) -> int:
    """Show how a job's rules place its parameters on a mesh; exit with 1 if they do not fit.

    It needs no devices, so the mesh may have any size.

    Args:
        job: module:attribute or file.py:attribute.
        mesh: mesh, e.g. "fsdp:64,tp:8"; the job's mesh if omitted.
        num_devices: number of devices; needed only if an axis size is -1.
        pad: patterns of leaves whose indivisible dims may be padded.
        all: print a row for every layer instead of folding equal ones.
        json: print the layout as JSON.
        picture: leaf whose tiles to draw.
        svg: file to write the picture to, as SVG.
    """
    if svg is not None and not picture:
        raise JobError("--svg needs --picture.", hint="add --picture LEAF.")
    if mesh is not None and not mesh.strip():
        raise JobError("--mesh is empty.", hint='pass a mesh such as "fsdp:8,tp:4"; is a shell variable unset?')
    loaded = load_job(job)
    mesh = getattr(loaded, "mesh", None) if mesh is None else mesh
    if mesh is None:
        raise JobError("neither --mesh nor the job sets a mesh.", hint='add --mesh "fsdp:8,tp:4".')
    target = create_abstract_mesh(mesh, num_devices=num_devices)
    with job_errors(loaded, job):
        tree = abstract_init(loaded.init)
    report = explain_layout(loaded.rules, tree, target, pad=pad)
    if not report.ok:
        show(str(report))
        return 1
    check_axes(loaded, target.shape)
    layout = Layout(target, report.leaves, jax.tree.structure(tree), report)
    if json:
        print(layout.to_json())
    elif picture:
        show(layout.picture(picture))
        if svg is not None:
            _write(svg, layout.picture(picture, svg=True))
    else:
        show(f"{layout.table(collapse=False)}\n{layout.summary()}" if all else layout)
        show(str(report))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}.", hint="choose a file in a writable folder.") from None
