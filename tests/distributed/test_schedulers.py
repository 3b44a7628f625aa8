"""Detection of mpirun, srun and Slurm from environment variables."""

import pytest

from meshwright.distributed.roll_call import Address
from meshwright.distributed.schedulers import ProcessSlot, coordinator_of, find_place, local_devices, on_slurm

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.fixture
def env(monkeypatch):
    def use(values):
        for name in (*MPIRUN, *SRUN, "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    use({})
    return use


def test_mpirun(env):
    env(MPIRUN)
    place = find_place()
    assert place == ProcessSlot("mpirun", 3, 4, 1, 2)
    assert coordinator_of(place) == Address("10.96.0.1", 1531576320 // 4096 % 4096 + 61440)
    env(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert coordinator_of(find_place()).host == "127.0.0.1"


def test_srun(env):
    env(SRUN)
    place = find_place()
    assert place == ProcessSlot("srun", 3, 4, 1, None)
    assert coordinator_of(place) == Address("node001", 77 + 61440)
    env(SRUN | {"SLURM_STEP_NUM_NODES": "1"})
    assert coordinator_of(find_place()).host == "127.0.0.1"


def test_alone(env):
    assert find_place() is None
    env(MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"})
    assert find_place() is None
    # A batch script, before any srun.
    env({name: value for name, value in SRUN.items() if "STEP" not in name})
    assert find_place() is None


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (SRUN, True),
        (MPIRUN | {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, True),  # mpirun inside a Slurm job
        (MPIRUN, False),
        (SRUN | {"SLURM_NTASKS": "1"}, False),
        ({name: value for name, value in SRUN.items() if "STEP" not in name}, False),  # a batch script, before any srun
    ],
)
def test_on_slurm_means_several_processes_in_a_slurm_job(env, values, wanted):
    env(values)
    assert on_slurm() is wanted


def test_processes_that_share_a_machine_take_one_gpu_each(env):
    env(MPIRUN)
    assert local_devices(find_place()) == [1]
    env(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert local_devices(find_place()) is None
    env(MPIRUN | {"CUDA_VISIBLE_DEVICES": "5"})  # assigned by the scheduler
    assert local_devices(find_place()) is None
    env(MPIRUN | {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert local_devices(find_place()) == [1]
    env(MPIRUN | {"JAX_LOCAL_DEVICE_IDS": "0,1"})
    assert local_devices(find_place()) is None
