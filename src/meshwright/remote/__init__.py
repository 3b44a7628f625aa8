"""Object stores (s3://, gs://, ...): a few operations on objects, one writer at a time, and transfers with hashes."""

from meshwright.remote.lease import Lease, take_lease
from meshwright.remote.object_store import ObjectStore, is_url, open_store

__all__ = ["ObjectStore", "is_url", "open_store", "Lease", "take_lease"]
