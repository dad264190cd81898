#!/usr/bin/env python3
"""Tests `moesaic placement`: EPLB's arrays, comparisons, formats of other engines, moves, traffic between nodes, broken
files and Ctrl-C."""
import ast
import gzip
import json
import pathlib
import re
import shutil
import struct
import tempfile
import unittest
import xml.etree.ElementTree
import zipfile

from moesaic_cli import ROOT, run, until_interrupted
from terminal import Terminal
from torch_file import Tensor, write_torch_file

PATTERNS = ROOT.parent / "shared" / "data" / "placement" / "omni"


def npy(rows, code="q", dtype="<i8"):
    """A .npy file of [layers, experts]."""
    header = str({"descr": dtype, "fortran_order": False, "shape": (len(rows), len(rows[0]))}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    values = [value for row in rows for value in row]
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack(f"<{len(values)}{code}", *values)


def read_npy(data):
    """Returns (shape, values) of int64 or int32 arrays."""
    size = struct.unpack_from("<H", data, 8)[0]
    header = ast.literal_eval(data[10:10 + size].decode())
    code = {"<i8": "q", "<i4": "i"}[header["descr"]]
    body = data[10 + size:]
    return header["shape"], list(struct.unpack(f"<{len(body) // struct.calcsize(code)}{code}", body))


def write_recording(path, counts):
    """Writes a file with the members of SGLang's recorder; `counts` are [windows][layers][experts] on a GPU."""
    shape = len(counts), len(counts[0]), len(counts[0][0])
    values = [value for window in counts for row in window for value in row]
    write_torch_file(path, {"rank": 0, "logical_count": Tensor(shape, values, "LongStorage", "cuda:0"),
                            "average_utilization_rate_over_window": None})


class Placement(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-placement-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def loads(self, *flags):
        run("placement", "generate", "--out", self.folder / "loads", "--layers", "4", *flags)
        return sorted((self.folder / "loads").glob("*.npy"))

    def plots(self, page):
        """Parses the plots of a page and returns their number."""
        plots = page.read_text().split("<svg")[1:]
        for svg in plots:
            xml.etree.ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
        return len(plots)

    def test_pages_have_the_numbers_that_are_printed(self):
        loads, plan, page = self.loads("--workloads", "2"), self.folder / "plan.json", self.folder / "page.html"
        run("placement", "plan", loads[0], "--ranks", "16", "--slots", "288", "--out", plan)
        printed = run("placement", "evaluate", *loads, "--plan", plan, "--html", page).stdout
        for load in loads:
            mean, worst = re.search(rf"{re.escape(str(load))} +(\S+) +(\S+)", printed).groups()
            self.assertIn(f"<td>{load}</td><td>{mean}</td><td>{worst}</td>", page.read_text())
        self.assertGreater(self.plots(page), 2)
        self.assertIn(str(plan), page.read_text())
        printed = run("placement", "compare", *loads, "--ranks", "16", "--slots", "288", "--leave-one-out", "--html", page).stdout
        for policy in ("default", "eplb", "omni", "flashlb", "swift", "lplb", "moesaic"):
            mean, worst = re.search(rf"^{policy} +(\S+) +(\S+)", printed, re.MULTILINE).groups()
            self.assertIn(f"<td>{policy}</td><td>{mean}</td><td>{worst}</td>", page.read_text())
        self.assertIn("Each workload is measured on a plan for the others.", page.read_text())
        self.assertEqual(self.plots(page), 1)

    def test_a_page_of_loads_has_the_numbers_that_are_printed(self):
        loads, page = self.loads("--workloads", "2"), self.folder / "loads.html"
        printed = run("placement", "explain", *loads, "--html", page).stdout
        for load in loads:
            hottest, variation = re.search(rf"{re.escape(str(load))} +(\S+) +(\S+)", printed).groups()
            self.assertIn(f"<td>{load}</td><td>{hottest}</td><td>{variation}</td>", page.read_text())
        self.assertEqual(self.plots(page), 1)

    def test_each_window_of_a_recording_is_a_workload(self):
        hot = [[[100 if expert // 4 == window else 1 for expert in range(16)]] for window in range(2)]
        load = self.folder / "load.json"
        load.write_text(json.dumps({"logical_count": hot}))
        size = ("--ranks", "4", "--json")
        whole = json.loads(run("placement", "plan", load, *size).stdout)["loads"]
        self.assertEqual([entry["name"] for entry in whole], [str(load)])
        plan = self.folder / "plan.json"
        windows = json.loads(run("placement", "plan", load, *size, "--windows", "--out", plan).stdout)["loads"]
        self.assertEqual([entry["name"] for entry in windows], [f"{load} window {i}" for i in range(2)])
        for entry in windows:  # each rank has one of the four hot experts of each window
            self.assertAlmostEqual(entry["mean"], 1, 6)
        evaluated = json.loads(run("placement", "evaluate", load, "--plan", plan, "--windows", "--json").stdout)["loads"]
        self.assertEqual([entry["mean"] for entry in evaluated], [entry["mean"] for entry in windows])
        compared = json.loads(run("placement", "compare", load, *size, "--windows", "--leave-one-out").stdout)["policies"]
        self.assertIn("moesaic", compared)
        self.assertEqual(len(json.loads(run("placement", "explain", load, "--windows", "--json").stdout)), 2)
        self.assertIn("needs two workloads or more, found 1",
                      run("placement", "compare", load, *size, "--leave-one-out", code=1).stderr)

    def test_eplb_gives_the_arrays_of_its_readme(self):
        load = self.folder / "load.npy"
        load.write_bytes(npy([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
                              [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]))
        out = self.folder / "plan.npz"
        run("placement", "plan", load, "--algorithm", "eplb", "--replicas", "16", "--groups", "4", "--nodes", "2",
            "--gpus", "8", "--out", out)
        with zipfile.ZipFile(out) as archive:
            self.assertIsNone(archive.testzip())
            arrays = {name.removesuffix(".npy"): read_npy(archive.read(name)) for name in archive.namelist()}
        self.assertEqual(arrays["phy2log"], ((2, 16), [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1,
                                                       7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]))
        shape, counts = arrays["logcnt"]
        self.assertEqual((shape, sum(counts)), ((2, 12), 32))
        (layers, experts, copies), slots = arrays["log2phy"]
        phy2log = arrays["phy2log"][1]
        for expert in range(layers * experts):
            row = slots[expert * copies:(expert + 1) * copies]
            used = row[:counts[expert]]
            self.assertEqual(row[counts[expert]:], [-1] * (copies - counts[expert]))
            for slot in used:
                self.assertEqual(phy2log[expert // experts * 16 + slot], expert % experts)

    def test_compare_prints_all_policies_and_moesaics_is_best(self):
        words = ("placement", "compare", *self.loads(), "--ranks", "32", "--slots", "288", "--leave-one-out", "--json")
        policies = json.loads(run(*words).stdout)["policies"]
        for name in ("default", "eplb", "omni", "flashlb", "swift", "lplb", "moesaic"):
            self.assertLessEqual(policies[name]["mean"], policies[name]["worst"])
        self.assertEqual(min(policies, key=lambda name: policies[name]["mean"]), "moesaic")
        split = json.loads(run(*words, "--split").stdout)["policies"]
        self.assertEqual(split["eplb"], policies["eplb"])
        self.assertLess(split["eplb+split"]["mean"], split["eplb"]["mean"])
        self.assertLess(split["moesaic"]["mean"], policies["moesaic"]["mean"])
        moved = json.loads(run(*words, "--moves", "0.3").stdout)["policies"]["moesaic"]
        self.assertLessEqual(moved["mean"], split["moesaic"]["mean"])
        self.assertLessEqual(moved["moves_per_rank"], 0.3)

    def test_a_plan_converts_to_every_format_and_back(self):
        load = self.loads()[0]
        plan = self.folder / "plan.json"
        page = self.folder / "plan.html"
        printed = run("placement", "plan", load, "--ranks", "16", "--slots", "288", "--out", plan, "--html", page).stdout
        self.assertIn("0 repeated on their rank", printed)
        self.assertIn("Load of each rank and layer", page.read_text())
        self.assertGreater(self.plots(page), 0)
        expected = run("placement", "evaluate", load, "--plan", plan).stdout
        for name, form in (("a.npz", "eplb"), ("b.json", "sglang"), ("c.npy", "omni"),
                           ("d.yaml", "tensorrt-llm")):
            run("placement", "convert", plan, "--out", self.folder / name, "--format", form)
            again = run("placement", "evaluate", load, "--plan", self.folder / name, "--ranks", "16").stdout
            self.assertEqual(again, expected)
        sglang = json.loads((self.folder / "b.json").read_text())["physical_to_logical_map"]
        self.assertEqual([len(row) for row in sglang], [288] * 4)
        run("placement", "convert", plan, "--out", self.folder / "e.yaml", "--first-layer", "3")
        self.assertTrue((self.folder / "e.yaml").read_text().startswith(
            "num_slots: 288\ninitial_global_assignments:\n  3: ["))
        run("placement", "convert", plan, "--out", self.folder / "f.json", "--format", "sglang", "--first-layer", "3")
        dense = json.loads((self.folder / "f.json").read_text())["physical_to_logical_map"]
        self.assertEqual(dense, [[slot % 256 for slot in range(288)]] * 3 + sglang)
        self.assertIn("--first-layer 3 needs --format sglang or tensorrt-llm", run(
            "placement", "plan", load, "--ranks", "16", "--out", plan, "--first-layer", "3", code=1).stderr)

    @unittest.skipUnless(PATTERNS.is_dir(), "needs ../shared/data/placement")
    def test_patterns_of_omniplacement_are_read(self):
        run("placement", "generate", "--out", self.folder / "loads", "--workloads", "1")
        load = self.folder / "loads" / "synthetic-0.npy"
        info = {"_8_ranks": (8, 33), "16_ranks_epmaxdeploy": (16, 17), "16_ranks_prefill": (16, 16), "32_dies": (32, 9),
                "64_dies": (64, 5)}
        for path in PATTERNS.glob("*.npy.gz"):
            ranks, slots = next(value for key, value in info.items() if key in path.name)
            pattern = self.folder / "pattern.npy"
            pattern.write_bytes(gzip.decompress(path.read_bytes()))
            printed = json.loads(run("placement", "evaluate", load, "--plan", pattern, "--json").stdout)
            self.assertEqual((printed["ranks"], printed["max_slots"], printed["repeated_replicas"]), (ranks, slots, 0))

    def test_dense_layers_of_sglang_do_not_change_the_measures(self):
        rows = [[(7 * e * e) % 101 + 1 for e in range(32)] for _ in range(2)]
        results = []
        for dense in (0, 3):
            load = self.folder / f"{dense}.json"
            load.write_text(json.dumps({"logical_count": [[0] * 32] * dense + rows}))
            compared = json.loads(run("placement", "compare", load, "--ranks", "8", "--slots", "36", "--json").stdout)
            self.assertEqual(list(compared["refused"]), ["eplb", "omni", "flashlb", "swift", "lplb"])  # 36 slots on 8 ranks
            explained = json.loads(run("placement", "explain", load, "--json").stdout)[0]
            results.append((compared["policies"], explained["max_over_mean"], explained["sigma"]))
            plan = self.folder / f"{dense}.npy"
            told = run("placement", "plan", load, "--ranks", "8", "--out", plan).stderr
            self.assertEqual("3 layers without tokens are left out" in told, dense > 0)
            self.assertEqual(read_npy(plan.read_bytes())[0], (8, 2, 32), "OmniPlacement counts MoE layers only")
            added = run("placement", "plan", load, "--ranks", "8", "--out", self.folder / "p.json", "--format", "sglang",
                        "--first-layer", "3", code=1 if dense else 0).stderr
            self.assertEqual("--first-layer 3: layer 0 of the loads has no tokens" in added, dense > 0)
        self.assertEqual(*results)

    def test_the_file_of_sglangs_recorder_is_read(self):
        counts = [[[(7 * e * e + 3 * layer + window) % 101 for e in range(32)] for layer in range(3)] for window in range(2)]
        recorded, load = self.folder / "recorded.pt", self.folder / "load.json"
        write_recording(recorded, counts)
        load.write_text(json.dumps({"logical_count": counts}))
        for flags in ((), ("--windows",)):
            entries = [json.loads(run("placement", "explain", path, *flags, "--json").stdout) for path in (recorded, load)]
            names = [[entry.pop("name") for entry in each] for each in entries]
            self.assertEqual(*entries)
            self.assertEqual([name.replace(str(load), str(recorded)) for name in names[1]], names[0])
        recorded.write_bytes(recorded.read_bytes().replace(b"logical_count", b"logical_xxxxx"))
        self.assertIn(f'{recorded}: a PyTorch file of loads has a tensor "logical_count"',
                      run("placement", "explain", recorded, code=1).stderr)
        recorded.write_bytes(recorded.read_bytes()[:-30])
        self.assertRegex(run("placement", "explain", recorded, code=1).stderr, "recorded.pt: .+")

    def test_the_moves_from_the_placement_in_use_are_counted(self):
        first, second = self.loads()[:2]
        current, following = self.folder / "current.json", self.folder / "next.json"
        size = ("--ranks", "16", "--slots", "288")
        run("placement", "plan", first, *size, "--out", current)
        planned = json.loads(run("placement", "plan", second, *size, "--current", current, "--max-moves", "6", "--out",
                                 following, "--json").stdout)
        before, after = (json.loads(path.read_text())["layers"] for path in (current, following))
        moves = [sum(len(set(new) - set(old)) for old, new in zip(*layers)) for layers in zip(before, after)]
        self.assertEqual(planned["migration"]["experts"], sum(moves))
        self.assertEqual(planned["migration"]["most_experts_of_a_layer"], max(moves))
        self.assertLessEqual(max(moves), 6)
        self.assertLessEqual(planned["migration"]["rounds"], sum(moves))
        for old, new in zip(sum(before, []), sum(after, [])):  # experts that stay keep their slots
            self.assertTrue(all(a == b or a not in new for a, b in zip(old, new)))
        words = ("placement", "evaluate", second, "--plan", following, "--current", current, "--json")
        self.assertEqual(json.loads(run(*words).stdout)["migration"], planned["migration"])

    def test_a_format_without_empty_slots_gets_replicas_in_new_ones(self):
        load = self.loads("--workloads", "1")[0]
        current, following = self.folder / "current.json", self.folder / "next.json"
        run("placement", "plan", load, "--ranks", "16", "--slots", "256", "--out", current)
        words = ("placement", "plan", load, "--ranks", "16", "--slots", "288", "--current", current, "--out", following, "--format", "sglang")
        refused = run(*words, "--max-moves", "31", code=1).stderr
        self.assertIn("--max-moves must be at least 32", refused)
        self.assertIn("found 31", refused)
        self.assertFalse(following.exists())
        result = run(*words, "--max-moves", "36", "--json")
        self.assertIn("up to 32 in a layer", result.stderr)
        self.assertTrue(all(len(layer) == 288 for layer in json.loads(following.read_text())["physical_to_logical_map"]))
        self.assertLessEqual(json.loads(result.stdout)["migration"]["most_experts_of_a_layer"], 36)

    def test_a_front_trades_balance_for_traffic(self):
        load, page, plan = self.loads("--workloads", "1")[0], self.folder / "front.html", self.folder / "plan.json"
        nodes = ("--ranks", "32", "--slots", "288", "--nodes", "4", "--groups", "8", "--top-groups", "4")
        points = json.loads(run("placement", "front", load, *nodes, "--html", page, "--json").stdout)
        self.assertIn("</html>", page.read_text())
        ours = [point for point in points if point["policy"] == "moesaic"]
        self.assertLess(ours[-1]["remote_nodes"], 0.95 * ours[0]["remote_nodes"])
        self.assertTrue(all(point["dominated"] for point in points if point["policy"] != "moesaic"))
        chosen = ours[len(ours) // 2]
        run("placement", "plan", load, *nodes, "--top-k", "8", "--traffic-weight", str(chosen["traffic_weight"]), "--out",
            plan)
        measured = json.loads(run("placement", "evaluate", load, "--plan", plan, *nodes[4:], "--top-k", "8",
                                  "--json").stdout)["loads"][0]
        self.assertAlmostEqual(measured["remote_nodes"], chosen["remote_nodes"], 9)
        self.assertAlmostEqual(measured["mean"], chosen["mean"], 9)

    def test_a_plan_for_times_is_predicted_to_be_faster(self):
        loads, cost = self.loads("--workloads", "2"), self.folder / "cost.json"
        cost.write_text(json.dumps({"batch_tokens": 512, "tile_rows": 64, "tile_s": 4e-6, "read_s": 1e-5, "groups": 8, "top_groups": 4,
                                    "token_bytes": 14336, "levels": [{"groups": 4, "bytes_per_s": 5e10}]}))
        size = ("--ranks", "16", "--slots", "288")
        seconds = []
        for flags in ((), ("--cost", cost)):
            run("placement", "plan", *loads, *size, "--out", self.folder / "plan.json", *flags)
            printed = json.loads(run("placement", "evaluate", *loads, "--plan", self.folder / "plan.json", "--cost", cost,
                                     "--json").stdout)
            seconds.append(max(load["predicted_s"]["total"] for load in printed["loads"]))
        self.assertLess(seconds[1], seconds[0])
        cost.write_text('{"batch_tokens": 512, "tile_s": -1}')
        self.assertIn("tile_s must be from 1e-12 to 1000, found -1",
                      run("placement", "plan", *loads, *size, "--cost", cost, code=1).stderr)

    def test_the_memory_of_a_rank_bounds_its_experts(self):
        load, plan = self.loads("--workloads", "1")[0], self.folder / "plan.json"
        words = ("placement", "plan", load, "--ranks", "16", "--slots", "256", "--quantile", "0.5", "--out", plan)
        run(*words, "--rank-memory", "700M", "--expert-bytes", "10M")
        held = [sum(map(len, rank)) for rank in zip(*json.loads(plan.read_text())["layers"])]
        self.assertLessEqual(max(held), 70)
        self.assertGreaterEqual(min(held), 64)
        self.assertGreater(sum(held), 16 * 64)  # replicas where they help, not on every rank
        run(*words, "--rank-memory", ",".join(["700M"] * 8 + ["650M"] * 8), "--expert-bytes", "10M")
        held = [sum(map(len, rank)) for rank in zip(*json.loads(plan.read_text())["layers"])]
        self.assertLessEqual(max(held[:8]), 70)
        self.assertGreater(max(held[:8]), 65)
        self.assertLessEqual(max(held[8:]), 65)
        self.assertIn("must be that of all ranks, or of each of the 16 ranks, found 2",
                      run(*words, "--rank-memory", "700M,650M", "--expert-bytes", "10M", code=1).stderr)
        self.assertIn("the memory of rank 0 must hold the 64 slots of 4 layers, found 63 slots",
                      run(*words, "--rank-memory", "639M", "--expert-bytes", "10M", code=1).stderr)
        run(*words, "--rank-memory", "639M", code=2)

    def test_explain_finds_the_skew_of_generated_loads(self):
        for skew, fits in (("log-normal", "log-normal"), ("power-law", "power law")):
            loads = self.loads("--skew", skew, "--drift", "independent", "--spread", "0.8")
            for entry in json.loads(run("placement", "explain", *loads, "--json").stdout):
                self.assertEqual(entry["fits"], fits)

    def test_generated_loads_are_like_those_of_files(self):
        loads = self.loads("--skew", "power-law", "--drift", "independent", "--spread", "0.8", "--workloads", "3")
        like = self.folder / "like"
        told = run("placement", "generate", *loads, "--out", like, "--workloads", "2", "--seed", "5").stderr
        self.assertRegex(told, r"4 layers of 256 experts, power law of alpha 0\.\d\d to \d\.\d\d, correlation 0\.\d\d")
        written = sorted(like.glob("*.npy"))
        self.assertEqual(len(written), 2)
        own, others = (json.loads(run("placement", "explain", *paths, "--json").stdout) for paths in (loads, written))
        for entry in others:
            self.assertEqual(entry["fits"], "power law")
            self.assertAlmostEqual(entry["alpha"], own[0]["alpha"], delta=0.1)
        for words, message in ((("--layers", "3"), "--layers: excludes FILES"), (("--correlation", "0.5"), "--correlation: excludes several")):
            self.assertIn(message, run("placement", "generate", *loads, "--out", like, *words, code=2).stderr)
        one = run("placement", "generate", loads[0], "--out", like, "--windows", "--correlation", "0.5").stderr
        self.assertIn("correlation 0.50", one)
        several = self.folder / "several.json"
        several.write_text(json.dumps({"logical_count": [[[1, 2, 3, 4]], [[4, 3, 2, 1]]]}))
        shares, first, second = (self.folder / f"{name}.npy" for name in ("shares", "first", "second"))
        shares.write_bytes(npy([[0.1, 0.2, 0.3, 0.3]], "d", "<f8"))
        first.write_bytes(npy([[1, 2, 3, 4], [0] * 4]))
        second.write_bytes(npy([[0] * 4, [1, 2, 3, 4]]))
        for words, message in (((several, "--windows", "--correlation", "0.5"), "--correlation: excludes several loads"),
                               ((shares,), "shares.npy: layers must have 1 token or more on average, found 0.9; scale loads"),
                               ((first, second), "first.npy: no layer has tokens in all of the 2 loads")):
            self.assertIn(message, run("placement", "generate", *words, "--out", like, code=1).stderr)
        self.assertIn("--windows: needs FILES", run("placement", "generate", "--out", like, "--windows", code=2).stderr)

    def test_broken_files_and_sizes_end_in_an_error(self):
        good, bad = self.folder / "good.npy", self.folder / "bad"
        good.write_bytes(npy([[1, 2, 3, 4]]))
        for content in (b"", b"{", b"\x93NUMPY", npy([[1, -2]]), npy([[float("nan")] * 2], "d", "<f8"),
                        good.read_bytes()[:-1], b'{"logical_count": 3}', b'{"logical_count": [[1], [2, 3]]}'):
            bad.write_bytes(content)
            result = run("placement", "plan", bad, "--ranks", "1", code=1)
            self.assertRegex(result.stderr, r"^moesaic placement: .+")
        self.assertIn("must be a file, found a folder",
                      run("placement", "convert", self.folder, "--out", "x.json", code=1).stderr)
        result = run("placement", "plan", good, "--ranks", "3", "--slots", "4", "--out", self.folder / "x.npz", code=1)
        self.assertIn("this format needs equally many slots", result.stderr)
        self.assertIn("--out FILE writes it", run("placement", "plan", good, "--ranks", "2").stderr)
        self.assertIn("--ranks or --gpus may be given once",
                      run("placement", "plan", good, "--ranks", "2", "--gpus", "2", code=2).stderr)
        for words in (("plan", good), ("front", good, "--ranks", "2"), ("plan", good, "--ranks", "2", "--moves", "1"), ("compare", good), ("plan",),
                      ("evaluate", good), ("plan", good, "--ranks", "2", "--max-moves", "1")):
            run("placement", *words, code=2)
        plan = ("plan", good, "--ranks", "2")
        for words, message in (((*plan, "--nodes", "2"), "--nodes: needs --top-k, --traffic-weight, or --algorithm eplb or omni"),
                               ((*plan, "--groups", "2"), "--groups: needs --top-k, --traffic-weight or --algorithm eplb"),
                               ((*plan, "--groups", "2", "--algorithm", "omni"), "--groups: needs --top-k"),
                               ((*plan, "--top-groups", "1"), "--top-groups: needs --top-k"),
                               ((*plan, "--top-k", "1"), "--top-k: needs --nodes"),
                               ((*plan, "--threads", "2", "--algorithm", "eplb"), "--threads: needs --algorithm moesaic"),
                               ((*plan, "--format", "sglang"), "--format: needs --out"),
                               (("evaluate", good, "--plan", good, "--nodes", "2"), "--nodes: needs --top-k"),
                               (("compare", good, "--ranks", "2", "--groups", "2"), "--groups: needs --nodes")):
            self.assertIn(message, run("placement", *words, code=2).stderr)
        result = run("placement", "plan", good, "--ranks", "2", "--slots", "3", code=1)
        self.assertIn("--slots must hold the 4 experts of a layer, found 3 slots", result.stderr)

    def test_ctrl_c_keeps_a_complete_plan(self):
        run("placement", "generate", "--out", self.folder / "loads", "--experts", "1024", "--workloads", "6")
        out = self.folder / "plan.json"
        words = ("placement", "plan", *sorted((self.folder / "loads").glob("*.npy")), "--ranks", "64", "--slots", "1280",
                 "--threads", "1", "--out", out)

        def interrupted():
            terminal = Terminal(*words)
            while not re.search(r"\b[1-9]\d*$", terminal.wait_for(" of 58 layers")):
                pass  # no layer is done
            terminal.type("\x03")
            terminal.wait_for("written to")
            return terminal.leave()

        until_interrupted(interrupted, out.unlink)
        plan = json.loads(out.read_text())
        self.assertEqual(len(plan["layers"]), 58)
        for layer in plan["layers"]:
            self.assertEqual({expert for rank in layer for expert in rank}, set(range(1024)))

    def test_ctrl_c_keeps_the_policies_that_are_finished(self):
        run("placement", "generate", "--out", self.folder / "loads", "--experts", "1024", "--workloads", "6")
        words = ("placement", "compare", *sorted((self.folder / "loads").glob("*.npy")), "--ranks", "64", "--slots", "1280",
                 "--threads", "1")
        told = []

        def interrupted():
            terminal = Terminal(*words)
            while not re.search(r"\b[1-9]\d*$", terminal.wait_for(" of 7 plans")):
                pass  # the first policy is not done
            terminal.type("\x03")
            told.append(terminal.wait_for("moves per rank"))
            terminal.wait_for("default")
            return terminal.leave()

        until_interrupted(interrupted, told.clear)
        missing = re.search(r"interrupted: not finished: (.*)", told[-1])[1]
        self.assertIn("moesaic", missing)
        self.assertNotIn("default", missing)


if __name__ == "__main__":
    unittest.main()
