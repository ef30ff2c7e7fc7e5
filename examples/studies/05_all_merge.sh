# Four processes of one MPI job; --ranks N takes another number. Sourced by run.sh.
more_packages=(libopenmpi-dev openmpi-bin)

start() {
  local ranks=4 rest=()
  while [ ${#flags[@]} -gt 0 ]; do
    case ${flags[0]} in
      --ranks) ranks=${flags[1]:?--ranks needs a number}; flags=("${flags[@]:2}") ;;
      *) rest+=("${flags[0]}"); flags=("${flags[@]:1}") ;;
    esac
  done
  flags=("${rest[@]}")
  # Open MPI's names for: as root, on fewer cores than processes, without spinning, without calls that containers forbid.
  launcher=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none mpiexec -n "$ranks")
}
