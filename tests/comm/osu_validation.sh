#!/bin/bash
# Runs the OSU micro-benchmarks of collectives in validation mode (-c), without and with libmoesaic_mpi.so.
#
# Usage: osu_validation.sh SOURCES LIBRARY [BUILD_FOLDER]
#   SOURCES       folder of the unpacked OSU micro-benchmarks (7.0 or newer), which no package registry has
#   LIBRARY       libmoesaic_mpi.so
#   BUILD_FOLDER  folder for the programs; default: osu-build in the current folder
# Environment: RANKS (4), MAX_BYTES (1048576), MPIRUN_FLAGS (shared memory, ranks share cores).
#
# Reductions run on ints and floats, the other ones on chars, too: OSU's sums of chars overflow, so their validation fails
# with any MPI. Prints one line per program and type; the exit status is 1 if a size fails with the library.
set -eu
if [ $# -lt 2 ]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
sources=$(realpath "$1")
library=$(realpath "$2")
mkdir -p "${3:-osu-build}"
build=$(realpath "${3:-osu-build}")
ranks=${RANKS:-4}
max_bytes=${MAX_BYTES:-1048576}
read -r -a flags <<< "${MPIRUN_FLAGS:---oversubscribe --mca pml ob1 --mca btl vader,self --mca btl_vader_single_copy_mechanism none --bind-to none --mca mpi_yield_when_idle 1}"
programs=$build/c/mpi/collective/blocking

if [ ! -x "$programs/osu_alltoallv" ]; then
  (cd "$build" && bash "$sources/configure" --disable-dependency-tracking CC=mpicc CXX=mpicxx > configure.log 2>&1 &&
    make -C c/mpi/collective/blocking > make.log 2>&1) || {
    echo "the benchmarks cannot be built: see configure.log and make.log in $build"
    exit 1
  }
fi

# Prints "PASSED/TESTED", sizes that passed of those that ran, then the first that failed.
validate() {  # PROGRAM TYPE LIBRARY
  local preload=() output
  [ -z "$3" ] || preload=(-x "LD_PRELOAD=$3")
  output=$(timeout 300 mpirun "${flags[@]}" -n "$ranks" "${preload[@]}" "$programs/$1" -c -T "$2" -m "4:$max_bytes" -i 20 -x 5 \
    2>&1) || true
  awk '/ Pass$/ { pass++; all++ } / Fail$/ { all++; if (first == "") first = ", failed at " $1 " bytes" }
       END { printf "%d/%d%s", pass, all, first }' <<< "$output"
}

failed=0
printf '%-26s %-10s %-24s %s\n' program type 'sizes passed without' 'sizes passed with the library'
for name in allreduce reduce_scatter reduce_scatter_block allgather allgatherv alltoall alltoallv; do
  types="mpi_int mpi_float"
  case $name in all[gt]*) types="mpi_char $types" ;; esac
  for type in $types; do
    without=$(validate "osu_$name" "$type" "")
    with=$(validate "osu_$name" "$type" "$library")
    printf '%-26s %-10s %-24s %s\n' "osu_$name" "$type" "$without" "$with"
    [ "${with%%/*}" -gt 0 ] && [ "${with%%/*}" = "${with##*/}" ] || failed=1
  done
done
exit $failed
