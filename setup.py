"""Maps ``kernels/`` at the top of the tree to the package ``hvd_greco.kernels``."""

from setuptools import find_packages, setup

kernels = ["hvd_greco.kernels"] + [f"hvd_greco.kernels.{name}" for name in find_packages("kernels")]
setup(
    packages=find_packages(include=["hvd_greco", "hvd_greco.*"]) + kernels,
    package_dir={"hvd_greco": "hvd_greco", "hvd_greco.kernels": "kernels"},
    package_data={"hvd_greco.kernels.cuda": ["*.cu", "*.cuh"]},
)
