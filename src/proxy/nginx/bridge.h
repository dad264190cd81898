/* The C interface between nginx and the gateway. No function throws; a function that can fail returns a value
 * that says so. Everything runs in the event loop's thread, except moesaic_task_run. */
#ifndef MOESAIC_PROXY_NGINX_BRIDGE_H_
#define MOESAIC_PROXY_NGINX_BRIDGE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moesaic_pool_s moesaic_pool_t;         /* settings and tokenizer of a moesaic_pool block */
typedef struct moesaic_gateway_s moesaic_gateway_t;   /* a pool in a worker process */
typedef struct moesaic_flow_s moesaic_flow_t;         /* a request */
typedef struct moesaic_task_s moesaic_task_t;         /* preparation of a request in a thread */
typedef struct moesaic_exchange_s moesaic_exchange_t; /* an exchange with an engine */
typedef struct moesaic_watcher_s moesaic_watcher_t;   /* waits for a descriptor */
typedef struct moesaic_lookup_s moesaic_lookup_t;     /* waits for the addresses of a name */

typedef struct {
  const char* data;
  size_t len;
} moesaic_text_t;

typedef struct {
  moesaic_text_t name, value;
} moesaic_header_t;

#define MOESAIC_STAGES 10

/* Facts for the access log. Times are nanoseconds of CLOCK_MONOTONIC; 0: the stage was not entered. Texts
 * belong to the caller and are cut at their ends. */
typedef struct {
  int64_t entered[MOESAIC_STAGES];
  int64_t first_token;
  int64_t prompt_tokens, matched_tokens, cached_tokens, output_tokens, retries;
  const char* outcome;
  char prefill[256], decode[256], request_id[128], key_name[64];
} moesaic_log_t;

typedef struct {
  void* connection; /* null: there is none */
  int reused;       /* it was idle */
  int refused;      /* the engine's address does not accept connections */
} moesaic_connected_t;

/* Operations of the event loop. `loop` is the argument of moesaic_gateway_create, `client` that of
 * moesaic_flow_create. None of them calls back before it returns. See gateway/transport.h. */
typedef struct {
  moesaic_connected_t (*connect)(void* loop, moesaic_exchange_t* exchange, const void* address,
                                 size_t address_len, moesaic_text_t head, moesaic_text_t body, int reuse);
  void (*release)(void* connection, int keep);
  void (*pause)(void* connection, int paused);
  void (*arm_timer)(void* loop, int64_t delay_ns, int idle);
  void (*run_soon)(void* loop);
  void* (*watch)(void* loop, int fd, moesaic_watcher_t* watcher);
  void (*unwatch)(void* watch);
  void* (*resolve)(void* loop, moesaic_text_t name,
                   moesaic_lookup_t* lookup); /* null: no name server is known */
  void (*cancel_resolve)(void* handle);
  void (*log)(void* loop, int error, moesaic_text_t message);
  void (*send_head)(void* client, int status, const moesaic_header_t* headers, size_t count);
  void (*send_body)(void* client, moesaic_text_t bytes);
  void (*end)(void* client, int complete);
  int (*prepare)(void* client, moesaic_task_t* task); /* 0: no thread is available */
} moesaic_shell_t;

/* Configuration. Functions that take `error` write a message there and return 0 when they fail. */
moesaic_pool_t* moesaic_pool_create(moesaic_text_t name);
void moesaic_pool_destroy(moesaic_pool_t* pool);
int moesaic_pool_set(moesaic_pool_t* pool, const moesaic_text_t* words, size_t count, char* error,
                     size_t error_len);
/* Whether names of its engines are looked up by nginx's resolver. */
int moesaic_pool_resolves(const moesaic_pool_t* pool);
/* Checks the block, resolves names and reads the tokenizer. */
int moesaic_pool_finish(moesaic_pool_t* pool, char* error, size_t error_len);
size_t moesaic_pool_zone_bytes(const moesaic_pool_t* pool);
/* Formats the shared memory, or uses it as it is when it was formatted by an earlier configuration. It must
 * have room for the engines. `note`: a message although it succeeds, or empty. */
int moesaic_pool_attach(moesaic_pool_t* pool, void* memory, size_t bytes, int formatted, char* note,
                        size_t note_len, char* error, size_t error_len);
/* Makes the engines of the configuration those of the shared memory. Called by the master process. */
int moesaic_pool_configure(moesaic_pool_t* pool, char* error, size_t error_len);

/* Worker processes. */
moesaic_gateway_t* moesaic_gateway_create(moesaic_pool_t* pool, const moesaic_shell_t* shell, void* loop,
                                          int32_t pid, char* error, size_t error_len);
void moesaic_gateway_destroy(moesaic_gateway_t* gateway);
/* Descriptor that becomes readable when another worker wakes this one. */
int moesaic_gateway_wake_fd(const moesaic_gateway_t* gateway);
void moesaic_gateway_retire(moesaic_gateway_t* gateway);
void moesaic_gateway_timer(moesaic_gateway_t* gateway);
void moesaic_gateway_soon(moesaic_gateway_t* gateway);
/* The wake descriptor is readable: reads it to its end. */
void moesaic_gateway_woken(moesaic_gateway_t* gateway);

moesaic_flow_t* moesaic_flow_create(moesaic_gateway_t* gateway, void* client);
/* `target` as the client wrote it; `path` decoded and normalized. The body is in `num_parts` parts. */
void moesaic_flow_start(moesaic_flow_t* flow, moesaic_text_t method, moesaic_text_t target,
                        moesaic_text_t path, const moesaic_header_t* headers, size_t count,
                        const moesaic_text_t* parts, size_t num_parts);
void moesaic_flow_pause(moesaic_flow_t* flow, int paused);
/* The last call for a flow. */
void moesaic_flow_detach(moesaic_flow_t* flow, moesaic_log_t* log);

void moesaic_task_run(moesaic_task_t* task); /* in any thread */
void moesaic_task_done(moesaic_task_t* task);

void moesaic_exchange_connected(moesaic_exchange_t* exchange);
void moesaic_exchange_data(moesaic_exchange_t* exchange, moesaic_text_t bytes);
void moesaic_exchange_closed(moesaic_exchange_t* exchange);
void moesaic_exchange_failed(moesaic_exchange_t* exchange, moesaic_text_t reason);
void moesaic_watcher_readable(moesaic_watcher_t* watcher);
/* Ends a lookup. `addresses`: sockaddrs; none: the name has none, unless there is a `fault`. */
void moesaic_lookup_done(moesaic_lookup_t* lookup, const moesaic_text_t* addresses, size_t count,
                         int64_t valid_ns, moesaic_text_t fault);

/* Pages. The caller frees the text with moesaic_free. */
enum {
  MOESAIC_METRICS,
  MOESAIC_STATE,
  MOESAIC_PAGE,
  MOESAIC_TRACE,
  MOESAIC_CHECK /* the state, with a check of it */
};
int moesaic_render(moesaic_gateway_t* gateway, int kind, char** text, size_t* len, const char** type);
void moesaic_free(char* text);
/* Drains or resumes an engine, as `query` says; returns the status of the answer `text`, or 0. The caller
 * frees the text with moesaic_free. */
int moesaic_engines(moesaic_gateway_t* gateway, moesaic_text_t query, char** text, size_t* len);
/* Whether the peer with this sockaddr may send messages to the metaserver. */
int moesaic_metaserver_allows(const moesaic_gateway_t* gateway, moesaic_text_t address);
/* Passes the message of a decode engine to the metaserver to its request; returns the status of the answer.
 */
int moesaic_metaserver(moesaic_gateway_t* gateway, moesaic_text_t body);

#ifdef __cplusplus
}
#endif
#endif /* MOESAIC_PROXY_NGINX_BRIDGE_H_ */
