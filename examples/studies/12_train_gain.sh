# Eigen for the ridge. Sourced by run.sh.
more_packages=(libeigen3-dev)
