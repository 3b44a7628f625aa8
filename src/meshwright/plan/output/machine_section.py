"""The machine and the mesh on it: devices by their place in the mesh, chips by their place in the machine."""

from __future__ import annotations

from meshwright.mesh.string import parse_mesh
from meshwright.pages import Markup, Section, join, mesh_picture, prose, table
from meshwright.plan.costs.links import LINK_SHARE, axis_links
from meshwright.plan.output.torus import torus_picture
from meshwright.plan.plan import Plan


def machine_section(plan: Plan) -> Section:
    """Returns the mesh, the torus or the hosts it lies on, and the links of every axis."""
    target = plan.target
    spec = parse_mesh(plan.setup.mesh).resolve(target.num_devices)
    axes = dict(zip(spec.names, spec.sizes, strict=True))
    hosts = f" on {target.num_hosts:,} {'host' if target.num_hosts == 1 else 'hosts'}" if target.chip else ""
    said = f"{target.title}: {target.num_devices:,} devices{hosts}, as {spec}."
    made: list[Markup] = [mesh_picture("Mesh", axes)]
    if target.platform == "tpu":
        made.append(torus_picture(target))
    elif target.platform == "gpu" and not spec.is_hybrid and target.num_devices > 1:
        # Devices lie in plain order here, so numbers mean the same as in the mesh.
        made.append(mesh_picture("Hosts", {"host": target.shape[0], "gpu": target.shape[1]}))
    links = axis_links(target, spec)
    if links:
        rows = [
            (axis, axes[axis], link.name, link.words, f"{link.speed / 1e9:,.0f} GB/s", link.hops, "computed")
            for axis, link in links.items()
        ]
        headings = ("axis", "devices", "link", "where", "each device sends", "hops", "basis")
        made.append(table(headings, rows, right=(1, 4, 5)))
        made.append(
            prose(
                f"Speeds are those of data sheets; {LINK_SHARE:.0%} of them is what collectives are assumed to reach."
            )
        )
    return Section("Mesh and machine", join([prose(said), *made]), short="Machine")
