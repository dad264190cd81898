/* Types shared by the files of the nginx module. */
#ifndef MOESAIC_PROXY_NGINX_MODULE_H_
#define MOESAIC_PROXY_NGINX_MODULE_H_

/* nginx's own headers come first: they set feature macros. */
#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_event.h>
#include <ngx_event_connect.h>
#include <ngx_http.h>
#include <ngx_thread_pool.h>

#include "proxy/nginx/bridge.h"

/* A moesaic_pool block of one configuration, and its gateway in a worker process. */
typedef struct {
  ngx_str_t name;
  moesaic_pool_t* pool;
  ngx_shm_zone_t* zone;
  ngx_thread_pool_t* threads;
  ngx_http_core_loc_conf_t* http; /* settings of the http block, with its resolver */
  /* Worker process only: */
  moesaic_gateway_t* gateway;
  ngx_event_t timer, soon, join;
  void* wake_watch;
  ngx_queue_t idle; /* connections to engines without an exchange */
  ngx_uint_t idle_count;
} moesaic_loop_t;

extern ngx_module_t ngx_http_moesaic_module;
extern const moesaic_shell_t moesaic_shell;

/* loop.c */
ngx_resolver_t* moesaic_loop_resolver(const moesaic_loop_t* loop); /* null: the http block has none */
void moesaic_loop_start(moesaic_loop_t* loop, ngx_cycle_t* cycle);
void moesaic_loop_stop(moesaic_loop_t* loop);
moesaic_connected_t moesaic_loop_connect(void* loop, moesaic_exchange_t* exchange, const void* address,
                                         size_t address_len, moesaic_text_t head, moesaic_text_t body,
                                         int reuse);
void moesaic_loop_release(void* connection, int keep);
void moesaic_loop_pause(void* connection, int paused);
void moesaic_loop_arm_timer(void* loop, int64_t delay_ns, int idle);
void moesaic_loop_run_soon(void* loop);
void* moesaic_loop_watch(void* loop, int fd, moesaic_watcher_t* watcher);
void moesaic_loop_unwatch(void* watch);
void* moesaic_loop_resolve(void* loop, moesaic_text_t name, moesaic_lookup_t* lookup);
void moesaic_loop_cancel_resolve(void* handle);
void moesaic_loop_log(void* loop, int error, moesaic_text_t message);

/* request.c */
ngx_int_t moesaic_request_handler(ngx_http_request_t* r, moesaic_loop_t* loop);
ngx_int_t moesaic_page_handler(ngx_http_request_t* r, moesaic_loop_t* loop, int kind);
ngx_int_t moesaic_engines_handler(ngx_http_request_t* r, moesaic_loop_t* loop);
ngx_int_t moesaic_metaserver_handler(ngx_http_request_t* r, moesaic_loop_t* loop);
const moesaic_log_t* moesaic_request_log(ngx_http_request_t* r);
void moesaic_client_send_head(void* client, int status, const moesaic_header_t* headers, size_t count);
void moesaic_client_send_body(void* client, moesaic_text_t bytes);
void moesaic_client_end(void* client, int complete);
int moesaic_client_prepare(void* client, moesaic_task_t* task);

#endif /* MOESAIC_PROXY_NGINX_MODULE_H_ */
