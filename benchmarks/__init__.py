"""One folder per experiment. This file keeps packages of the same name away, such as the one that opacus installs."""
