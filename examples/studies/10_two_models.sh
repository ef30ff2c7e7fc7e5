# Eigen for the fit, and the target model. Sourced by run.sh, which names the source model.
more_packages=(libeigen3-dev)

start() {
  case " ${flags[*]} " in *" --target"*) return ;; esac
  flags=(--target "$(bash "$root/examples/support/get_model.sh" sibling)" "${flags[@]}")
}
