"""Page sections on the mesh and its links, and on the layout of every parameter: rule, spec, bytes and tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.layout import Layout, LeafLayout, format_bytes
from meshwright.layout.leaf import leaf_rows
from meshwright.loop.report.placement_section import leaf_pictures, leaf_table
from meshwright.mesh.string import parse_mesh
from meshwright.pages import Markup, Section, fold, join, mesh_picture, prose, table
from meshwright.plan.costs.links import Link, axis_links
from meshwright.plan.output.axes_picture import axes_picture, machine_axes
from meshwright.plan.plan import Plan
from meshwright.plan.target import Target

GATHERS = (2**20, 2**26, 2**30)  # bytes
LARGE = 2**20  # bytes; smaller replicated parameters are not mentioned


def machine_section(plan: Plan) -> Section:
    """Returns pictures of the mesh and the torus or hosts, and a table of links."""
    target = plan.target
    spec = parse_mesh(plan.setup.mesh).resolve(target.num_devices)
    axes = dict(zip(spec.names, spec.sizes, strict=True))
    where = f" on {target.num_hosts:,} {'host' if target.num_hosts == 1 else 'hosts'}" if target.chip else ""
    said = f"{target.title}: {target.num_devices:,} devices{where}, as {spec}."
    picture = axes_picture(target, spec)
    split = [axis for axis, size in axes.items() if size > 1]
    made: list[Markup] = [prose(said), *([] if picture is None else [picture]), mesh_picture("Mesh", axes)]
    runs = machine_axes(target, spec)
    if target.platform == "tpu":
        made += _torus(target, runs, split)
    elif target.platform == "gpu" and not spec.is_hybrid and target.num_devices > 1:
        # GPUs are placed in plain order, so device numbers match those of the mesh.
        hosts = {"host": target.shape[0], "gpu": target.shape[1]}
        made.append(mesh_picture("Hosts", hosts, runs=runs, mesh_axes=split))
    links = axis_links(target, spec)
    if links:
        rows = [
            (axis, axes[axis], link.name, link.words, _speed(link.speed), *_gathers(link), link.hops, "computed")
            for axis, link in links.items()
        ]
        gathers = [f"gather of {format_bytes(size)}" for size in GATHERS]
        headings = ("axis", "devices", "link", "placement", "speed per device", *gathers, "hops", "basis")
        sources = "; ".join(dict.fromkeys(link.rates["all-gather"].source for link in links.values()))
        words = (
            "Speeds per device come from data sheets. A gather in which each device sends so many bytes reaches the "
            "speed in its column, with its start and hops.",
            f"Sources of the columns: {sources}.",
        )
        made += [table(headings, rows, right=(1, 4, *range(5, 6 + len(GATHERS)))), prose(*words)]
    return Section("Mesh and machine", join(made), short="Machine")


def _gathers(link: Link) -> list[str]:
    return [_speed(size / link.seconds("all-gather", size)) for size in GATHERS]


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.0f} GB/s"


def _torus(target: Target, runs: Mapping[str, Sequence[str]], split: Sequence[str]) -> list[Markup]:
    dims = list(zip("xyz", target.shape, target.wraps, strict=False))  # of two dims, only x and y
    words = [f"{name} ({size}, {'a ring' if wraps else 'a line'})" for name, size, wraps in dims]
    slices = f" of each of {target.num_slices} slices" if target.num_slices > 1 else ""
    picture = mesh_picture("Torus", {name: size for name, size, _ in dims}, node="chip", runs=runs, mesh_axes=split)
    numbers = "A chip has its coordinates; the numbers of devices above follow the mesh."
    colors = "A line has the color of the axis that runs along it, or is gray if several do."
    return [picture, prose(f"Chips{slices} are linked along {', '.join(words)}.", numbers, colors)]


def layout_section(layout: Layout) -> Section:
    """Returns a table and pictures of the parameters; the rest of the state is folded."""
    params = [leaf for leaf in layout.leaves if leaf.name.startswith("params/")]
    rest = [leaf for leaf in layout.leaves if not leaf.name.startswith("params/")]
    size = sum(leaf.bytes_total for leaf in params)
    each = sum(leaf.bytes_per_device for leaf in params)
    said = prose(
        f"Parameters take {format_bytes(size)} in total and {format_bytes(each)} per device (computed, exact).",
        _copies(params, layout.mesh.size),
        "Hover over a device to see its shard.",
    )
    other = fold(f"Optimizer and other state, {len(rest):,} leaves", leaf_table(leaf_rows(rest)))
    return Section("Parameters", join([said, leaf_pictures(params, layout), leaf_table(leaf_rows(params)), other]))


def _copies(params: Sequence[LeafLayout], num_devices: int) -> str:
    whole = [leaf for leaf in params if leaf.is_replicated and leaf.bytes_total >= LARGE]
    if num_devices == 1 or not whole:
        return ""
    named = ", ".join(f"{leaf.name} ({format_bytes(leaf.bytes_total)})" for leaf in whole[:4])
    more = f" and {len(whole) - 4} more" if len(whole) > 4 else ""
    return f"Every device holds a full copy of {named}{more}."
