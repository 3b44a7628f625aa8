import jax
import pytest

import meshwright as mw


@pytest.mark.parametrize(
    ("before", "flags", "ends_with"),
    [
        ("", "", "5"),
        ("", "--xla_force_host_platform_device_count=5", "5"),
        (
            "",
            "--xla_force_host_platform_device_count=3",
            "simulate_cpu_devices(5) disagrees with XLA_FLAGS, which sets 3 CPU devices.",
        ),
        (
            "jax.devices()",
            "",
            "JAX has already started with 1 cpu device(s); it is too late to simulate 5 CPU devices.",
        ),
    ],
    ids=["first", "same flag", "other flag", "too late"],
)
def test_simulate_cpu_devices(run_python, before, flags, ends_with):
    code = f"""
    import jax, meshwright as mw
    {before}
    try:
        mw.simulate_cpu_devices(5)
        print(jax.device_count())
    except mw.MeshError as error:
        print(str(error).splitlines()[0] if error.hint else "no hint")
    """
    result = run_python(code, XLA_FLAGS=flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == ends_with


def test_simulate_cpu_devices_accepts_the_current_number():
    jax.devices()
    mw.simulate_cpu_devices(8)
    with pytest.raises(mw.MeshError, match="cannot simulate 0 devices"):
        mw.simulate_cpu_devices(0)
