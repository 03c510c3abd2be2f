"""A Hugging Face Hub on loopback: storage buckets, their Xet content store and S3 gateway, with faults on order.

The real clients (huggingface_hub with hf_xet, obstore) work with it unchanged. ::

    with serving(tmp_path / "hub") as hub:
        hub.create_bucket("team/run")
        subprocess.run([...], env={**os.environ, **hub.environment})
        hub.fault("status", "/batch", code=503, times=2)
        assert not hub.requests("/cdn/xorb")
"""

from tests.support.hub_store.hub import TOKEN, Hub, serving

__all__ = ["TOKEN", "Hub", "serving"]
