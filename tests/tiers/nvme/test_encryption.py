"""Encrypted tenants: what is on disk, who can read it, and what changes when encryption does."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvstore.core.events import CORRUPT, OK
from kvstore.errors import ConfigError, TierError
from kvstore.tiers.nvme import key_files as keys_module
from kvstore.tiers.nvme.encryption import BlockCipher, TenantKeys
from kvstore.tiers.nvme.journal import Journal, Namespace
from kvstore.tiers.nvme.key_files import KeyFiles, MasterKey
from kvstore.tiers.nvme.store import RecordStore
from kvstore.types import ENCRYPTION_BYTES
from tests.tiers.nvme.encrypted import (
    BLOCK,
    MASTER,
    MIB,
    OTHER_MASTER,
    files,
    opened,
    spilled,
)

PLAIN = {"team": False, "other": False}


def overwrite(slab: Path, offset: int, data: bytes) -> None:
    with slab.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def key_file(path: Path, tenant: str = "team") -> Path:
    return path / "keys" / f"{tenant}.key"


class TestBlocks:
    def test_encrypted_blocks_are_readable_after_a_restart(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            assert [folder.write(1, b"a", 0), folder.write(1, b"b", 1), folder.write(2, b"a")] == [OK] * 3
            assert [folder.read(1, b"a", 0), folder.read(1, b"b", 1), folder.read(2, b"a")] == [OK] * 3
        with opened(tmp_path) as folder:
            assert folder.restored() == [(1, b"a"), (1, b"b"), (2, b"a")]
            assert [folder.read(1, b"a", 0), folder.read(1, b"b", 1), folder.read(2, b"a")] == [OK] * 3

    def test_no_plain_byte_is_on_disk(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            for index in range(8):
                folder.write(1, b"secret %d" % index, index)
                folder.read(1, b"secret %d" % index, index)
            folder.write(3, b"public")
            assert [spilled(tmp_path, b"secret %d" % index) for index in range(8)] == [[]] * 8
            assert spilled(tmp_path, b"public") == ["slabs/000002.slab"], "where it is plain it is found"

    @pytest.mark.parametrize(
        "offset",
        [0, BLOCK // 2, BLOCK - 1, *range(BLOCK, BLOCK + ENCRYPTION_BYTES)],
        ids=lambda at: f"byte {at}",
    )
    def test_any_bit_that_changes_is_found(self, tmp_path: Path, offset: int) -> None:
        with opened(tmp_path) as folder:
            folder.write(1, b"a")
            byte = folder.slab(1).read_bytes()[offset]
            overwrite(folder.slab(1), offset, bytes([byte ^ 0x10]))
            assert folder.read(1, b"a") == CORRUPT
            overwrite(folder.slab(1), offset, bytes([byte]))
            assert folder.read(1, b"a") == OK

    def test_another_blocks_slot_does_not_open(self, tmp_path: Path) -> None:
        with opened(tmp_path, encrypt={"team": True, "other": True}) as folder:
            size = folder.slot_bytes(1)
            for number, key, index in [(1, b"a", 0), (1, b"b", 1), (2, b"a", 0), (3, b"a", 0)]:
                assert folder.write(number, key, index) == OK
            for source, index in [(1, 1), (2, 0), (3, 0)]:
                slot = folder.slab(source).read_bytes()[index * size :][:size]
                overwrite(folder.slab(1), 0, slot)
                assert folder.read(1, b"a") == CORRUPT
            assert folder.read(1, b"b", 1) == OK

    def test_a_block_that_opens_is_still_verified(self, tmp_path: Path) -> None:
        """Writers can reach a slot until it is sealed: a seal that is whole does not make its bytes right."""
        with opened(tmp_path) as folder:
            assert folder.write(1, b"a", data=b"x" * BLOCK) == OK
            assert folder.read(1, b"a") == CORRUPT

    def test_it_is_sealed_on_another_thread(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        threads, seal, open_ = set(), BlockCipher.encrypt, BlockCipher.decrypt

        def sealing(self: BlockCipher, *args: Any) -> None:
            threads.add(threading.current_thread())
            seal(self, *args)

        def opening(self: BlockCipher, *args: Any) -> bool:
            threads.add(threading.current_thread())
            return open_(self, *args)

        monkeypatch.setattr(BlockCipher, "encrypt", sealing)
        monkeypatch.setattr(BlockCipher, "decrypt", opening)
        with opened(tmp_path) as folder:
            folder.write(1, b"a")
            folder.read(1, b"a")
            assert len(threads) == 2
            assert threading.current_thread() not in threads

    def test_other_threads_run_meanwhile(self) -> None:
        """The event loop is one of them: the GIL is free while a block is sealed or opened."""
        size = 8 * MIB
        cipher, slot = BlockCipher(bytes(32), bytes(16), size), memoryview(bytearray(size + ENCRYPTION_BYTES))
        payload, turns, stop = memoryview(bytearray(size)), [0], threading.Event()

        def take_turns() -> None:
            while not stop.is_set():
                turns[0] += 1
                time.sleep(0)

        def turns_within(work: Callable[[], object]) -> int:
            """How often the other thread ran within a call, the most of some tries."""
            most = 0
            for _ in range(20):
                before = turns[0]
                work()
                most = max(most, turns[0] - before)
            return most

        before, thread = sys.getswitchinterval(), threading.Thread(target=take_turns)
        sys.setswitchinterval(1000)  # nobody gets the GIL but from a thread that gives it up
        thread.start()
        try:
            assert turns_within(lambda: cipher.encrypt(b"a", payload, slot)) > 0
            assert turns_within(lambda: cipher.decrypt(b"a", slot, payload)) > 0
            assert turns_within(payload.tobytes) == 0, "so what keeps the GIL is found"
        finally:
            sys.setswitchinterval(before)
            stop.set()
            thread.join()

    def test_nothing_repeats_where_the_same_is_sealed_again(self) -> None:
        cipher, same = BlockCipher(bytes(32), bytes(16), 4096), memoryview(bytes(4096))
        slots = [memoryview(bytearray(2 * 4096)) for _ in range(500)]
        for slot in slots:
            cipher.encrypt(b"a", same, slot)
        tagged = 4096 + ENCRYPTION_BYTES - 12
        assert len({bytes(slot[tagged : tagged + 12]) for slot in slots}) == len(slots), "nonces"
        assert len({bytes(slot[:16]) for slot in slots}) == len(slots)
        assert {bytes(slot[4096 + ENCRYPTION_BYTES :]) for slot in slots} == {bytes(4096 - ENCRYPTION_BYTES)}

    def test_blocks_have_keys_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that even the same nonce twice says nothing about two blocks."""
        monkeypatch.setattr(os, "urandom", bytes)
        ciphers = [
            BlockCipher(bytes(32), bytes(16), 4096),
            BlockCipher(bytes(32), b"f" * 16, 4096),
            BlockCipher(b"k" * 32, bytes(16), 4096),
        ]
        streams = set()
        for cipher in ciphers:
            for key in (b"a", b"b"):
                slot = memoryview(bytearray(2 * 4096))
                cipher.encrypt(key, memoryview(bytes(4096)), slot)
                streams.add(bytes(slot[:4096]))
        assert len(streams) == 6


class TestKeys:
    @pytest.mark.parametrize("master", [OTHER_MASTER, None], ids=["wrong", "missing"])
    def test_without_the_master_key_nothing_starts_and_nothing_is_lost(
        self, tmp_path: Path, master: MasterKey | None
    ) -> None:
        with opened(tmp_path) as folder:
            folder.write(1, b"a")
        before = files(tmp_path)
        for encrypt in ({"team": True}, {"team": False}, {}):
            with pytest.raises(TierError, match="tenant team") as raised, opened(tmp_path, master, encrypt):
                pass
            assert "nothing was changed" in raised.value.hint
            assert files(tmp_path) == before
        with opened(tmp_path) as folder:
            assert folder.read(1, b"a") == OK

    def test_a_tenant_that_is_to_be_encrypted_needs_a_master_key(self, tmp_path: Path) -> None:
        with pytest.raises(TierError, match="tenant team is to be encrypted"), opened(tmp_path, None):
            pass

    def test_a_tenants_key_is_no_other_tenants(self, tmp_path: Path) -> None:
        with opened(tmp_path, encrypt={"team": True, "other": True}):
            pass
        key_file(tmp_path, "team").write_bytes(key_file(tmp_path, "other").read_bytes())
        with pytest.raises(TierError, match="tenant team"), opened(tmp_path):
            pass

    def test_a_key_of_another_size_is_named(self, tmp_path: Path) -> None:
        with opened(tmp_path):
            pass
        os.truncate(key_file(tmp_path), 30)
        with pytest.raises(TierError, match=r"team\.key has 30 bytes"), opened(tmp_path):
            pass

    def test_copies_of_slabs_are_unreadable_after_erasure(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path, copy = tmp_path / "tier", tmp_path / "copy"
        with opened(path) as folder:
            folder.write(1, b"a")
        wrapped = key_file(path).read_bytes()
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("keys"))
        keys = TenantKeys(path, MASTER, {"team": True})
        keys.erase("team")
        assert not any(wrapped in data for data in files(path).values())
        assert not keys.has_key("team")
        keys.erase("team")
        # The slabs and their records are brought back from the copy; the key has no copy.
        shutil.rmtree(path / "slabs")
        shutil.copytree(copy, path, dirs_exist_ok=True)
        with caplog.at_level(logging.WARNING), opened(path, encrypt={}) as folder:
            assert "their tenant's data key is gone" in caplog.text
            assert folder.restored() == []
        with opened(path) as folder:
            assert folder.restored() == []
            overwrite(folder.slab(1), 0, (copy / "slabs" / "000000.slab").read_bytes())
            assert folder.read(1, b"a") == CORRUPT, "a new key is another key"

    @pytest.mark.parametrize("step", ["unlink", "fsync"])
    def test_a_crash_while_a_key_is_erased_leaves_it_erased_or_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        with opened(tmp_path) as folder:
            folder.write(1, b"a")
        keys = TenantKeys(tmp_path, MASTER, {"team": True})

        def crash(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Path if step == "unlink" else keys_module.os, step, crash)
            with pytest.raises(KeyboardInterrupt):
                keys.erase("team")
        assert key_file(tmp_path).read_bytes() == bytes(60)
        assert KeyFiles(tmp_path).load() == {}
        with opened(tmp_path) as folder:
            assert folder.restored() == []
            assert folder.write(1, b"a") == OK

    def test_a_crash_while_a_key_is_made_leaves_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def crash(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(keys_module.os, "fsync", crash)
            with pytest.raises(KeyboardInterrupt):
                KeyFiles(tmp_path).put("team", b"w" * 60)
        assert KeyFiles(tmp_path).load() == {}
        with opened(tmp_path) as folder:
            assert folder.write(1, b"a") == OK

    def test_a_disk_that_keeps_no_key_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with opened(tmp_path) as folder:
            folder.tier.keys.erase("team")

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(keys_module.os, "fsync", full)
            with pytest.raises(TierError, match="No space left"):
                folder.tier.put_namespace(1, Namespace("team", {"block_bytes": BLOCK}, bytes(16)))

    @pytest.mark.parametrize("tenant", ["..", "a/b", "key", "Größe", "a.key"])
    def test_any_name_has_a_file(self, tmp_path: Path, tenant: str) -> None:
        files = KeyFiles(tmp_path)
        files.put(tenant, b"w" * 60)
        assert files.load() == {tenant: b"w" * 60}
        assert [path.parent for path in tmp_path.rglob("*.key")] == [tmp_path / "keys"]
        files.erase(tenant)
        assert files.load() == {}

    def test_only_the_owner_can_reach_them(self, tmp_path: Path) -> None:
        with opened(tmp_path):
            assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
            assert key_file(tmp_path).stat().st_mode & 0o777 == 0o600


class TestTurning:
    def test_on_leaves_no_plain_byte(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with opened(tmp_path, encrypt=PLAIN) as folder:
            assert [folder.write(1, b"old"), folder.write(3, b"public")] == [OK] * 2
            assert spilled(tmp_path, b"old")
        with caplog.at_level(logging.WARNING), opened(tmp_path) as folder:
            assert "1 blocks are forgotten: encryption of team" in caplog.text
            assert folder.restored() == [(3, b"public")]
            assert spilled(tmp_path, b"old") == []
            assert folder.write(1, b"new") == OK
            assert folder.read(3, b"public") == OK

    def test_turning_encryption_on_removes_plain_blocks(self, tmp_path: Path) -> None:
        with opened(tmp_path, encrypt=PLAIN) as folder:
            folder.write(1, b"evicted")
            folder.tier.drop(folder.identity(1, b"evicted"), folder.copy(1, b"evicted", 0).target_where)
        with opened(tmp_path, encrypt=PLAIN) as folder:
            assert folder.restored() == []
            assert spilled(tmp_path, b"evicted") == ["slabs/000000.slab"], "where it lies unrecorded"
        with opened(tmp_path):
            assert spilled(tmp_path, b"evicted") == []

    def test_a_crash_in_between_is_made_up_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with opened(tmp_path, encrypt=PLAIN) as folder:
            folder.write(1, b"old")

        def crash(_: object) -> None:
            assert spilled(tmp_path, b"old") == [], "no key before the last plain byte is gone"
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TenantKeys, "settle", crash)
            with pytest.raises(KeyboardInterrupt), opened(tmp_path):
                pass
        with opened(tmp_path) as folder:
            assert folder.restored() == []
            assert folder.write(1, b"new") == OK
        with opened(tmp_path) as folder:
            assert folder.restored() == [(1, b"new")]

    def test_turning_encryption_off_removes_encrypted_blocks_and_the_key(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            folder.write(1, b"old")
        with opened(tmp_path, encrypt=PLAIN) as folder:
            assert folder.restored() == []
            assert not key_file(tmp_path).exists()
            assert folder.write(1, b"new") == OK
        with opened(tmp_path, None, PLAIN) as folder:
            assert folder.restored() == [(1, b"new")], "and then the master key can go"
            assert folder.read(1, b"new") == OK

    def test_a_tenant_that_is_not_configured_stays_as_it_is(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            folder.write(1, b"sealed")
            folder.write(3, b"plain")
        with opened(tmp_path, encrypt={}) as folder:
            assert folder.restored() == [(1, b"sealed"), (3, b"plain")]
            assert [folder.read(1, b"sealed"), folder.read(3, b"plain")] == [OK] * 2
            assert folder.write(1, b"more", 1) == OK
            assert spilled(tmp_path, b"more") == []

    def test_a_new_tenant_is_encrypted_from_its_first_block(self, tmp_path: Path) -> None:
        with opened(tmp_path, encrypt={}) as folder:
            assert not folder.tier.keys.encrypts("late")
            folder.tier.keys.encrypt("late")
            assert folder.tier.keys.encrypts("late")
            folder.tier.put_namespace(9, Namespace("late", {"block_bytes": BLOCK}, bytes(16)))
        assert TenantKeys(tmp_path, MASTER, {}).has_key("late")
        with opened(tmp_path / "none", None, {}) as folder, pytest.raises(TierError, match="late"):
            folder.tier.keys.encrypt("late")

    def test_records_say_which_namespaces_are_sealed(self, tmp_path: Path) -> None:
        with opened(tmp_path):
            pass
        store = RecordStore(tmp_path, None, 8 << 20)
        assert {n: space.encrypted for n, space in store.load().namespaces.items()} == {
            1: True,
            2: True,
            3: False,
        }
        store.close()

    def test_a_row_that_does_not_say_is_of_plain_blocks(self, tmp_path: Path) -> None:
        row = msgpack.packb(["team", {"block_bytes": BLOCK}, bytes(16)])
        journal = Journal.open(tmp_path, MIB)
        journal._change("namespaces", {bytes([0, 0, 0, 7]): row})
        journal.drain()
        assert journal.load().namespaces[7] == Namespace("team", {"block_bytes": BLOCK}, bytes(16), False)
        journal.close()


class TestMasterKey:
    def write(self, tmp_path: Path, text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "key"
        path.write_text(text)
        path.chmod(mode)
        return path

    def test_a_file_of_64_hex_digits(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, MASTER.key.hex() + "\n", 0o400)
        master = MasterKey.load(path)
        assert master == MasterKey(str(path), MASTER.key)
        assert MASTER.key.hex() not in repr(master)
        assert repr(MASTER.key) not in repr(master)

    @pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32, "00" * 16 + " " + "00" * 16])
    def test_an_invalid_key_file_is_named(self, tmp_path: Path, text: str) -> None:
        path = self.write(tmp_path, text)
        with pytest.raises(ConfigError, match="64 hex digits") as raised:
            MasterKey.load(path)
        assert str(path) in raised.value.message
        assert not text or text not in str(raised.value)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
    def test_a_key_that_others_can_reach_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = self.write(tmp_path, MASTER.key.hex(), mode)
        with pytest.raises(ConfigError, match=f"{path} has mode {mode:04o}") as raised:
            MasterKey.load(path)
        assert f"chmod 600 {path}" in raised.value.hint

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=f"cannot read the master key {tmp_path}/none"):
            MasterKey.load(tmp_path / "none")

    def test_a_credential(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
        assert MasterKey.load(None) is None
        # systemd lets the service in by an access list, which shows as a right of the group.
        self.write(tmp_path, MASTER.key.hex(), 0o440).rename(tmp_path / "kvstore-key")
        assert MasterKey.load(None) == MasterKey("the systemd credential kvstore-key", MASTER.key)
        monkeypatch.delenv("CREDENTIALS_DIRECTORY")
        assert MasterKey.load(None) is None


def test_clients_need_no_cryptography() -> None:
    code = "import sys, kvstore; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
