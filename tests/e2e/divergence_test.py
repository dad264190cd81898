"""Tests `moesaic perplexity --reference` and `moesaic report`, which compare a model with its source."""
import json
import math
import pathlib
import tempfile
import unittest

from moesaic_cli import ROOT, run

TINY = ROOT / "models" / "moesaic-tiny"
TEXT = TINY / "heldout.jsonl"
GOLDEN = json.loads((ROOT / "tests" / "golden" / "tiny_int8_divergence.json").read_text())
F32 = ["--dtype", "f32", "--reference-dtype", "f32"]


def compare(model, *flags):
    flags = ["--text", TEXT, "--reference", TINY, "-c", GOLDEN["window"], "--max-tokens", GOLDEN["tokens"], *flags]
    return json.loads(run("perplexity", model, *flags, "--format", "json").stdout)


class DivergenceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.int8 = pathlib.Path(cls.temporary.name) / "int8"
        run("quantize", TINY, "-o", cls.int8, "--scheme", "w8a8")

    def test_divergence_from_itself_is_zero(self):
        report = compare(TINY)
        self.assertEqual((report["kl_max"], report["same_top"]), (0, 1))
        self.assertEqual((report["ratio"], report["ratio_low"], report["ratio_high"]), (1, 1, 1))
        self.assertEqual([layer["layer"] for layer in report["router_flips"]["layers"]], [1, 2, 3])
        self.assertEqual(report["router_flips"]["share"], 0)

    def test_numbers_equal_those_of_transformers(self):
        """Both run in fp32: rounding changes logits by some 1e-5, and may change a choice between near equals."""
        mine = compare(self.int8, *F32)
        self.assertEqual(mine["scored"], GOLDEN["scored"])
        self.assertAlmostEqual(math.log(mine["base_perplexity"]), GOLDEN["base_nll"], delta=1e-4)
        self.assertAlmostEqual(mine["kl"], GOLDEN["kl"], delta=1e-3 * GOLDEN["kl"])
        self.assertAlmostEqual(mine["kl_error"], GOLDEN["kl_error"], delta=1e-3 * GOLDEN["kl_error"])
        self.assertAlmostEqual(mine["kl_max"], GOLDEN["kl_max"], delta=1e-2 * GOLDEN["kl_max"])
        self.assertAlmostEqual(mine["same_top"], GOLDEN["same_top"], delta=2.5 / GOLDEN["scored"])
        self.assertAlmostEqual(math.log(mine["ratio"]), GOLDEN["log_ratio"], delta=1e-5)
        t_of_7 = 2.365  # the 0.975 quantile of Student's distribution for the eight windows
        for bound, sign in (("ratio_low", -1), ("ratio_high", 1)):
            expected = GOLDEN["log_ratio"] + sign * t_of_7 * GOLDEN["log_ratio_error"]
            self.assertAlmostEqual(math.log(mine[bound]), expected, delta=1e-5)
        flips = [layer["share"] for layer in mine["router_flips"]["layers"]]
        self.assertEqual(len(flips), len(GOLDEN["router_flips"]))
        for share, expected in zip(flips, GOLDEN["router_flips"]):
            self.assertAlmostEqual(share, expected, delta=2.5 / GOLDEN["scored"])

    def test_running_one_model_at_a_time_gives_equal_numbers(self):
        """The temporary file holds f32; only the normalization after reading differs."""
        together, apart = compare(self.int8), compare(self.int8, "--one-at-a-time")
        self.assertEqual(together["router_flips"], apart["router_flips"])
        self.assertEqual(together["same_top"], apart["same_top"])
        self.assertAlmostEqual(together["kl"], apart["kl"], delta=1e-6)
        self.assertEqual(compare(TINY, "--one-at-a-time")["router_flips"]["share"], 0)

    def test_incomparable_models_are_rejected(self):
        model = ROOT / "tests" / "golden" / "qwen3-tied"
        fault = run("perplexity", self.int8, "--text", TEXT, "--reference", model, code=1).stderr
        self.assertIn(f"{model} has a vocabulary of 160, {self.int8} one of 1536", fault)
        saved = pathlib.Path(self.temporary.name) / "saved"
        saved.write_text("")
        for flags in (["--reference", TINY, "--kl-base", saved], ["--one-at-a-time"]):
            run("perplexity", self.int8, "--text", TEXT, *flags, code=2)

    def test_report_is_a_self_contained_page(self):
        alone = run("report", self.int8).stdout
        self.assertIn("--source MODEL --text FILE` runs both models", alone)
        self.assertIn("no quantize.json", alone)
        text = run("report", self.int8, "--source", TINY, "--text", TEXT, "-c", "256", "--max-tokens", "1024").stdout
        self.assertEqual(text, (self.int8 / "report.md").read_text())
        for part in ("KL(source || this)", "layer 3", "experts.down_proj", "read per token"):
            self.assertIn(part, text)
        page = (self.int8 / "report.html").read_text()
        self.assertEqual(page.count("<svg"), 3)
        for outside in ("<script", "src=", "href=", "url("):
            self.assertNotIn(outside, page)
        roofline = run("report", self.int8, "--source", TINY, "--roofline").stdout
        for what in ("rounding", "processor, of all computing", "processor, of the run", "disk, of the run"):
            self.assertRegex(roofline, rf"\| {what} +\| +[0-9.]+ \| +[0-9.]+ \| +[0-9.e+]+ % \|")
        run("report", self.int8, "--roofline", code=2)
        record = json.loads((self.int8 / "quantize.json").read_text())
        (self.int8 / "quantize.json").write_text(json.dumps({**record, "device": "Card 9"}))
        roofline = run("report", self.int8, "--source", TINY, "--roofline").stdout
        self.assertIn("Not measured: Hessians, factors and rounding ran on a device, Card 9", roofline)
        self.assertNotIn("Measured now", roofline)
        (self.int8 / "quantize.json").write_text('{"stages": 3}')
        self.assertIn('quantize.json: "stages" must be a list, found 3', run("report", self.int8, code=1).stderr)
        (self.int8 / "quantize.json").unlink()
        run("report", self.int8, "--text", TEXT, code=2)


if __name__ == "__main__":
    unittest.main()
