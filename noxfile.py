"""The CI matrix: the test suite on every supported Megatron release, in an environment each."""

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["matrix"]

TORCH = "2.13.0"
# The newest patch release of each line. 0.17 is the first whose wheel carries megatron.training;
# older ones want NumPy 1, and pkg_resources from a setuptools that still has it.
RELEASES = ["0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"]
FIRST_WITH_TRAINING = (0, 17)


@nox.session(python="3.12")
@nox.parametrize("megatron", RELEASES)
def matrix(session: nox.Session, megatron: str) -> None:
    """Run the tests on one release: `nox -s "matrix(megatron='0.16.1')"`."""
    with_training = tuple(map(int, megatron.split(".")[:2])) >= FIRST_WITH_TRAINING
    if with_training:
        requirements = [f"megatron-core[training]=={megatron}", "-e", ".[trainer]"]
    else:
        requirements = [f"megatron-core=={megatron}", "numpy<2", "setuptools<81", "-e", "."]
    groups = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test")
    session.install(f"torch=={TORCH}", *requirements, *groups)
    # 0.15 builds a CUDA extension while it is imported; without a device torch finds no
    # architecture to build it for, and the import fails where a CUDA compiler is installed.
    session.run("pytest", *session.posargs, env={"TORCH_CUDA_ARCH_LIST": "8.0"})
