"""Daemons, clients and other processes on a real GPU: the tests that elsewhere run on a fake of cupy."""

from __future__ import annotations

import pytest

from tests.daemon import test_hbm

ON_A_GPU = (
    "test_a_prefix_is_served_from_the_pool_from_the_second_time_on",
    "test_blocks_come_from_nvme_past_dram",
    "test_blocks_written_on_the_gpu_are_stored_in_the_pool_and_copied_to_nvme",
    "test_get_and_scatter_fill_device_arrays",
    "test_the_documented_example_works_as_pasted",
    "test_rooms_are_filled_from_parts_on_the_device",
    "test_pages_of_device_memory_are_stored_and_loaded",
    "test_without_a_pool_blocks_come_from_dram",
    "test_a_prefix_larger_than_the_pool_is_served_from_dram",
    "test_a_wrong_byte_is_found_in_the_pool_and_served_right_by_the_same_call",
    "test_the_scrubber_looks_at_the_pool",
    "test_a_pool_has_quotas_and_other_tenants_cannot_map_it",
    "test_two_processes_share_one_extent_and_one_may_be_killed",
    "test_a_daemon_that_is_killed_is_a_miss_and_the_next_one_has_a_new_pool",
    "test_blocks_that_only_the_pool_has_are_written_to_nvme_at_a_stop",
    "test_without_nvme_blocks_evicted_from_the_pool_stay_in_dram",
    "test_the_asyncio_client_reads_and_writes_on_the_device",
)
globals().update({name: getattr(test_hbm, name) for name in ON_A_GPU})


@pytest.fixture
def control() -> None:
    """Nothing is faked."""
