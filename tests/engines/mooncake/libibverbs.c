/* A fake libibverbs for machines without RDMA: it knows no device, and no other call succeeds. Mooncake is linked
   to it, and over TCP asks it for nothing. */
#include <stddef.h>

#define FAILS(name) int name(void) { return -1; }
#define NOTHING(name) void *name(void) { return NULL; }

void **ibv_get_device_list(int *count) { static void *none[1]; if (count) *count = 0; return none; }
void ibv_free_device_list(void **list) { (void)list; }
int ibv_fork_init(void) { return 0; }

FAILS(_ibv_query_gid_ex) FAILS(ibv_ack_async_event) FAILS(ibv_ack_cq_events) FAILS(ibv_close_device)
FAILS(ibv_dealloc_pd) FAILS(ibv_dereg_mr) FAILS(ibv_destroy_comp_channel) FAILS(ibv_destroy_cq)
FAILS(ibv_destroy_qp) FAILS(ibv_get_async_event) FAILS(ibv_get_cq_event) FAILS(ibv_modify_qp)
FAILS(ibv_query_device) FAILS(ibv_query_gid) FAILS(ibv_query_port) FAILS(ibv_query_qp)
NOTHING(ibv_alloc_pd) NOTHING(ibv_create_comp_channel) NOTHING(ibv_create_cq) NOTHING(ibv_create_qp)
NOTHING(ibv_event_type_str) NOTHING(ibv_get_device_name) NOTHING(ibv_open_device) NOTHING(ibv_reg_mr)
NOTHING(ibv_reg_mr_iova2) NOTHING(ibv_wc_status_str)
