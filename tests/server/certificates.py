"""Makes certificates for tests with the openssl program."""
import subprocess

from serving import patient


def make(folder, name, *, days=30, passphrase=None):
    """Returns the PEM files (certificate, key) of `name`, self-signed and valid for 127.0.0.1 as well."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    seal = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *seal,
                    "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},DNS:localhost,IP:127.0.0.1",
                    "-days", str(days), "-keyout", str(key), "-out", str(certificate)],
                   check=True, capture_output=True, timeout=patient(120))
    return certificate, key
