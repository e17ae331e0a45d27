"""How the examples find their server."""

import argparse
import sys

import requests
import sglang as sgl


def connect(description: str | None) -> None:
    """Read --url and use the server there for all programs; ends with one line if none answers."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a running SGLang server [%(default)s]")
    url = parser.parse_args().url
    try:
        requests.get(f"{url}/health", timeout=30).raise_for_status()
        sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    except (requests.RequestException, OSError) as error:
        reason = "nothing listens there" if isinstance(error, requests.ConnectionError) else error
        sys.exit(f"no SGLang server answers at {url} ({reason}); start one, or give its address with --url")
