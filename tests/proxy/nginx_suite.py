#!/usr/bin/env python3
"""Runs nginx's own tests with the distribution's nginx, without the proxy module and with it, and compares the results.

    tests/proxy/nginx_suite.py CHECKOUT [--jobs 4] [--only PATTERN ...]

CHECKOUT is a checkout of the repository nginx-tests, which this script does not fetch. The suite loads every dynamic module that
nginx was configured with: on Debian the packages libnginx-mod-http-geoip, -http-image-filter, -http-perl, -http-xslt-filter,
-mail, -stream and -stream-geoip. With the module, every configuration of
the suite also has a pool, so that worker processes run its code. A file whose results differ runs twice more, alone: tests with
times in them fail now and then on a busy machine. The exit status is 0 if files passed and no file differs. Needs perl.
"""
import argparse
import collections
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

from proxying import MODULE, find_nginx

POOL = "moesaic_pool suite { zone 4m; max_live 64; engine http://127.0.0.1:1; health off; }"


def dynamic_modules():
    """Returns the folder of nginx's dynamic modules, and the names of those that are not installed."""
    text = subprocess.run([find_nginx(), "-V"], capture_output=True, text=True).stderr
    folder = re.search(r"--modules-path=(\S+)", text)
    folder = pathlib.Path(folder[1]) if folder else pathlib.Path(find_nginx()).parent
    files = {"http_image_filter_module": "http_image_filter", "http_geoip_module": "http_geoip", "http_perl_module": "http_perl",
             "http_xslt_module": "http_xslt_filter", "mail": "mail", "stream": "stream", "stream_geoip_module": "stream_geoip"}
    names = [name for option, name in files.items() if f"--with-{option}=dynamic" in text]
    return folder, [name for name in names if not (folder / f"ngx_{name}_module.so").exists()]


def run(checkout, file, modules, module):
    """Returns the lines of results, without texts."""
    environment = dict(os.environ, TEST_NGINX_BINARY=find_nginx(), PERL5LIB=str(checkout / "lib"), TEST_NGINX_CATLOG="0", TEST_NGINX_MODULES=str(modules))
    # Otherwise workers of root cannot read the suite's files.
    environment["TEST_NGINX_GLOBALS"] = "user root;" if os.geteuid() == 0 else ""
    if module:
        environment["TEST_NGINX_GLOBALS"] += f"load_module {MODULE};"
        environment["TEST_NGINX_GLOBALS_HTTP"] = POOL
    try:
        done = subprocess.run(["perl", file.name], cwd=checkout, env=environment, capture_output=True, text=True, errors="replace", timeout=600)
    except subprocess.TimeoutExpired:
        return ["timeout"]
    lines = []
    for line in done.stdout.splitlines():
        if re.match(r"1\.\.0", line):
            return ["skipped" + line.partition("#")[2].lower().replace("skip", ":", 1)]
        if result := re.match(r"(not ok|ok) (\d+)(.*)", line):
            note = re.search(r"# (TODO|skip)", result[3], re.I)
            # Cases marked as TODO are expected to fail, and may pass at times.
            lines.append(f"{result[2]} {'todo' if note and note[1] == 'TODO' else 'skip' if note else result[1]}")
    return lines + ([] if done.returncode == 0 else [f"exit {done.returncode}"])


def kind(lines):
    if lines and lines[0].startswith("skipped"):
        return "skipped"
    return "failed" if not lines or any("not ok" in line or "exit" in line or line == "timeout" for line in lines) else "passed"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", default=["*.t"], help="patterns of files")
    flags = parser.parse_args()
    checkout = flags.checkout.resolve()
    if not (checkout / "lib" / "Test" / "Nginx.pm").exists():
        sys.exit(f"{checkout} is no checkout of nginx-tests: it has no lib/Test/Nginx.pm")
    if not MODULE.exists() or find_nginx() is None:
        sys.exit(f"{MODULE} or nginx is missing")
    files = sorted({file for pattern in flags.only for file in checkout.glob(pattern)})
    modules, missing = dynamic_modules()
    if missing:
        sys.exit(f"nginx's tests load modules that are not in {modules}: {' '.join(missing)}")
    results = {}
    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        jobs = {pool.submit(run, checkout, file, modules, module): (file, module) for file in files for module in (False, True)}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            results[jobs[job]] = job.result()
            print(f"\r{done} of {len(jobs)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    different = []
    for file in files:
        for _ in range(2):
            if results[file, False] == results[file, True]:
                break
            for module in (False, True):
                results[file, module] = run(checkout, file, modules, module)
        if results[file, False] != results[file, True]:
            different.append(file)
    version = subprocess.run([find_nginx(), "-v"], capture_output=True, text=True).stderr.strip()
    print(f"{version}, {len(files)} files")
    for module in (False, True):
        kinds = collections.Counter(kind(results[file, module]) for file in files)
        cases = sum(len(results[file, module]) for file in files if kind(results[file, module]) == "passed")
        print(f"{'with' if module else 'without'} the module: " + ", ".join(f"{kinds[k]} {k}" for k in ("passed", "failed", "skipped")) +
              f"; {cases} checks in the files that passed")
    for file in different:
        print(f"different: {file.name}\n  without: {results[file, False]}\n  with:    {results[file, True]}")
    same = [file.name for file in files if file not in different and kind(results[file, True]) == "failed"]
    if same:
        print("failed alike with and without: " + " ".join(same))
    sys.exit(1 if different or not any(kind(lines) == "passed" for lines in results.values()) else 0)


if __name__ == "__main__":
    main()
