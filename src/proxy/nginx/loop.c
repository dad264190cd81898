/* The event loop for the gateway: connections to engines, the timer, descriptors, and wake-ups between
 * workers. */
#include "proxy/nginx/module.h"

#define MOESAIC_READ_BYTES 65536
#define MOESAIC_MAX_IDLE 512 /* idle connections of a worker to all engines */

typedef struct {
  ngx_queue_t queue; /* in loop->idle while there is no exchange */
  moesaic_loop_t* loop;
  moesaic_exchange_t* exchange;
  ngx_peer_connection_t peer;
  ngx_str_t name;
  moesaic_text_t send[2]; /* the parts of the request's head and body that were not sent yet */
  u_char address[sizeof(struct sockaddr_storage)];
  size_t address_len;
  unsigned connected : 1, paused : 1, busy : 1, released : 1, keep : 1;
} moesaic_connection_t;

typedef struct {
  moesaic_loop_t* loop;
  moesaic_watcher_t* watcher; /* null: this is the wake descriptor */
  ngx_connection_t* connection;
} moesaic_watch_t;

static void moesaic_read(ngx_event_t* event);
static void moesaic_write(ngx_event_t* event);

static void moesaic_close(moesaic_connection_t* connection) {
  if (connection->peer.connection != NULL) ngx_close_connection(connection->peer.connection);
  ngx_free(connection);
}

/* The exchange has released the connection. */
static void moesaic_settle(moesaic_connection_t* connection) {
  ngx_connection_t* c = connection->peer.connection;
  moesaic_loop_t* loop = connection->loop;

  if (!connection->keep || ngx_exiting || ngx_terminate || loop->idle_count >= MOESAIC_MAX_IDLE || c->error ||
      c->read->eof) {
    moesaic_close(connection);
    return;
  }
  connection->exchange = NULL;
  connection->released = 0;
  connection->paused = 0;
  c->idle = 1; /* nginx closes idle connections when the worker is asked to exit */
  ngx_queue_insert_head(&loop->idle, &connection->queue);
  loop->idle_count++;
  if (c->read->ready) { /* closed meanwhile? */
    ngx_post_event(c->read, &ngx_posted_events);
  }
}

static ngx_int_t moesaic_get_peer(ngx_peer_connection_t* peer, void* data) { return NGX_OK; }

static moesaic_connection_t* moesaic_take_idle(moesaic_loop_t* loop, const void* address,
                                               size_t address_len) {
  ngx_queue_t *q, *next;
  moesaic_connection_t* connection;
  u_char byte;

  for (q = ngx_queue_head(&loop->idle); q != ngx_queue_sentinel(&loop->idle); q = next) {
    next = ngx_queue_next(q);
    connection = ngx_queue_data(q, moesaic_connection_t, queue);
    if (connection->address_len != address_len || ngx_memcmp(connection->address, address, address_len) != 0)
      continue;
    ngx_queue_remove(q);
    loop->idle_count--;
    /* The engine may have closed it, and the event loop has not seen that yet. */
    if (recv(connection->peer.connection->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != -1 ||
        ngx_socket_errno != NGX_EAGAIN) {
      moesaic_close(connection);
      continue;
    }
    connection->peer.connection->idle = 0;
    return connection;
  }
  return NULL;
}

moesaic_connected_t moesaic_loop_connect(void* data, moesaic_exchange_t* exchange, const void* address,
                                         size_t address_len, moesaic_text_t head, moesaic_text_t body,
                                         int reuse) {
  moesaic_loop_t* loop = data;
  moesaic_connected_t result = {NULL, 0, 0};
  moesaic_connection_t* connection;
  ngx_connection_t* c;
  ngx_int_t rc;

  connection = reuse ? moesaic_take_idle(loop, address, address_len) : NULL;
  if (connection != NULL) {
    connection->exchange = exchange;
    connection->send[0] = head;
    connection->send[1] = body;
    connection->connected = 0;
    ngx_post_event(connection->peer.connection->write, &ngx_posted_events);
    result.connection = connection;
    result.reused = 1;
    return result;
  }
  connection = ngx_calloc(sizeof(moesaic_connection_t), ngx_cycle->log);
  if (connection == NULL || address_len > sizeof(connection->address)) {
    if (connection != NULL) ngx_free(connection);
    return result;
  }
  ngx_memcpy(connection->address, address, address_len);
  connection->address_len = address_len;
  connection->loop = loop;
  connection->exchange = exchange;
  connection->send[0] = head;
  connection->send[1] = body;
  ngx_str_set(&connection->name, "engine");
  connection->peer.sockaddr = (struct sockaddr*)connection->address;
  connection->peer.socklen = (socklen_t)address_len;
  connection->peer.name = &connection->name;
  connection->peer.get = moesaic_get_peer;
  connection->peer.log = ngx_cycle->log;
  connection->peer.log_error = NGX_ERROR_ERR;

  rc = ngx_event_connect_peer(&connection->peer);
  if (rc != NGX_OK && rc != NGX_AGAIN) {
    moesaic_close(connection);
    result.refused = rc == NGX_DECLINED;
    return result;
  }
  c = connection->peer.connection;
  c->data = connection;
  c->read->handler = moesaic_read;
  c->write->handler = moesaic_write;
  c->sendfile = 0;
  ngx_tcp_nodelay(c);
  if (rc == NGX_OK) {
    ngx_post_event(c->write, &ngx_posted_events);
  }
  result.connection = connection;
  return result;
}

void moesaic_loop_release(void* data, int keep) {
  moesaic_connection_t* connection = data;

  connection->released = 1;
  connection->keep = keep && connection->send[0].len == 0 && connection->send[1].len == 0;
  if (!connection->busy) moesaic_settle(connection);
}

void moesaic_loop_pause(void* data, int paused) {
  moesaic_connection_t* connection = data;
  ngx_connection_t* c = connection->peer.connection;

  connection->paused = paused ? 1 : 0;
  if (!paused && c->read->ready) {
    ngx_post_event(c->read, &ngx_posted_events);
  }
}

/* Runs `call` on the exchange; false: the connection does not exist any more. */
#define MOESAIC_TELL(connection, call)                     \
  ((connection)->busy = 1, (call), (connection)->busy = 0, \
   (connection)->released ? (moesaic_settle(connection), 0) : 1)

static void moesaic_fail(moesaic_connection_t* connection, ngx_err_t err) {
  u_char text[NGX_MAX_ERROR_STR];
  moesaic_text_t reason;

  reason.data = (char*)text;
  reason.len = err ? (size_t)(ngx_strerror(err, text, sizeof(text)) - text) : 0;
  (void)MOESAIC_TELL(connection, moesaic_exchange_failed(connection->exchange, reason));
}

/* Sends as much of head and body as the socket takes. */
static ngx_int_t moesaic_send(moesaic_connection_t* connection) {
  ngx_connection_t* c = connection->peer.connection;
  ngx_chain_t links[2], *rest = NULL;
  ngx_buf_t bufs[2];
  ngx_uint_t i;

  for (i = 2; i-- > 0; /* void */) {
    if (connection->send[i].len == 0) continue;
    ngx_memzero(&bufs[i], sizeof(ngx_buf_t));
    bufs[i].memory = 1;
    bufs[i].start = bufs[i].pos = (u_char*)connection->send[i].data;
    bufs[i].end = bufs[i].last = bufs[i].pos + connection->send[i].len;
    links[i].buf = &bufs[i];
    links[i].next = rest;
    rest = &links[i];
  }
  if (rest == NULL) return NGX_OK;
  if (c->send_chain(c, rest, 0) == NGX_CHAIN_ERROR) return NGX_ERROR;
  for (i = 0; i < 2; i++) {
    if (connection->send[i].len == 0) continue;
    connection->send[i].data = (const char*)bufs[i].pos;
    connection->send[i].len = (size_t)(bufs[i].last - bufs[i].pos);
  }
  return NGX_OK;
}

static void moesaic_write(ngx_event_t* event) {
  ngx_connection_t* c = event->data;
  moesaic_connection_t* connection = c->data;
  int err = 0;
  socklen_t len = sizeof(int);

  if (connection->exchange == NULL) return;
  if (!connection->connected) {
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, (void*)&err, &len) == -1) err = ngx_socket_errno;
    if (err != 0) {
      moesaic_fail(connection, err);
      return;
    }
    connection->connected = 1;
    if (!MOESAIC_TELL(connection, moesaic_exchange_connected(connection->exchange))) return;
  }
  /* An engine may have answered and closed without reading everything. */
  if (moesaic_send(connection) != NGX_OK && !c->read->ready) {
    moesaic_fail(connection, ngx_socket_errno);
    return;
  }
  if (ngx_handle_write_event(c->write, 0) != NGX_OK) moesaic_fail(connection, 0);
}

static void moesaic_read(ngx_event_t* event) {
  static u_char buffer[MOESAIC_READ_BYTES];
  ngx_connection_t* c = event->data;
  moesaic_connection_t* connection = c->data;
  moesaic_text_t bytes;
  ssize_t n;

  if (connection->exchange ==
      NULL) { /* idle: closed by the engine or by nginx, or the engine sends unexpected bytes */
    n = c->close ? 0 : recv(c->fd, buffer, 1, MSG_PEEK);
    if (n == -1 && ngx_socket_errno == NGX_EAGAIN) {
      event->ready = 0;
      if (ngx_handle_read_event(event, 0) == NGX_OK) return;
    }
    ngx_queue_remove(&connection->queue);
    connection->loop->idle_count--;
    moesaic_close(connection);
    return;
  }
  while (!connection->paused) {
    n = c->recv(c, buffer, sizeof(buffer));
    if (n == NGX_AGAIN) break;
    if (n == NGX_ERROR) {
      moesaic_fail(connection, ngx_socket_errno);
      return;
    }
    if (n == 0) {
      (void)MOESAIC_TELL(connection, moesaic_exchange_closed(connection->exchange));
      return;
    }
    bytes.data = (char*)buffer;
    bytes.len = (size_t)n;
    if (!MOESAIC_TELL(connection, moesaic_exchange_data(connection->exchange, bytes))) return;
  }
  if (ngx_handle_read_event(event, 0) != NGX_OK) moesaic_fail(connection, 0);
}

/* --- The timer and the end of the turn --- */

static void moesaic_on_timer(ngx_event_t* event) {
  moesaic_loop_t* loop = event->data;
  if (loop->gateway != NULL) moesaic_gateway_timer(loop->gateway);
}

static void moesaic_on_soon(ngx_event_t* event) {
  moesaic_loop_t* loop = event->data;
  if (loop->gateway != NULL) moesaic_gateway_soon(loop->gateway);
}

void moesaic_loop_arm_timer(void* data, int64_t delay_ns, int idle) {
  moesaic_loop_t* loop = data;

  /* nginx keeps an armed timer that differs by less than 300 ms. */
  if (loop->timer.timer_set) ngx_del_timer(&loop->timer);
  if (delay_ns < 0) return;
  loop->timer.cancelable = idle ? 1 : 0;
  ngx_add_timer(&loop->timer, (ngx_msec_t)((delay_ns + 999999) / 1000000));
}

void moesaic_loop_run_soon(void* data) {
  moesaic_loop_t* loop = data;
  ngx_post_event(&loop->soon, &ngx_posted_events);
}

/* --- Descriptors --- */

static void moesaic_watch_read(ngx_event_t* event) {
  ngx_connection_t* c = event->data;
  moesaic_watch_t* watch = c->data;
  moesaic_loop_t* loop = watch->loop;

  if (watch->watcher != NULL) {
    moesaic_watcher_readable(watch->watcher);
    return;
  }
  if (c->close) { /* the worker is asked to exit */
    c->close = 0;
    moesaic_gateway_retire(loop->gateway);
    return;
  }
  moesaic_gateway_woken(loop->gateway);
}

void* moesaic_loop_watch(void* data, int fd, moesaic_watcher_t* watcher) {
  moesaic_watch_t* watch;
  ngx_connection_t* c;

  watch = ngx_calloc(sizeof(moesaic_watch_t), ngx_cycle->log);
  if (watch == NULL) return NULL;
  c = ngx_get_connection(fd, ngx_cycle->log);
  if (c == NULL) {
    ngx_free(watch);
    return NULL;
  }
  watch->loop = data;
  watch->watcher = watcher;
  watch->connection = c;
  c->data = watch;
  c->read->handler = moesaic_watch_read;
  c->read->log = ngx_cycle->log;
  c->read->channel = 1; /* it may be open when the worker exits */
  if (ngx_add_event(c->read, NGX_READ_EVENT, NGX_CLEAR_EVENT) != NGX_OK) {
    c->fd = (ngx_socket_t)-1;
    ngx_free_connection(c);
    ngx_free(watch);
    return NULL;
  }
  return watch;
}

void moesaic_loop_unwatch(void* data) {
  moesaic_watch_t* watch = data;
  ngx_connection_t* c = watch->connection;

  ngx_del_event(c->read, NGX_READ_EVENT, 0);
  if (c->read->posted) { /* the macro is several statements */
    ngx_delete_posted_event(c->read);
  }
  c->read->channel = 0;
  c->idle = 0;
  c->fd = (ngx_socket_t)-1; /* the descriptor belongs to the gateway */
  ngx_free_connection(c);
  ngx_free(watch);
}

/* --- Names --- */

typedef struct {
  moesaic_lookup_t* lookup;
  ngx_resolver_ctx_t* ctx; /* null: the resolver has answered */
  ngx_event_t done;
  ngx_pool_t* pool;
  moesaic_text_t* addresses;
  ngx_uint_t count;
  int64_t valid_ns;
  moesaic_text_t fault;
} moesaic_resolve_t;

ngx_resolver_t* moesaic_loop_resolver(const moesaic_loop_t* loop) {
  ngx_resolver_t* resolver = loop->http->resolver;

  /* A block without the directive has a resolver without servers. */
  return resolver != NULL && resolver->connections.nelts > 0 ? resolver : NULL;
}

static void moesaic_resolve_done(ngx_event_t* event) {
  moesaic_resolve_t* resolve = event->data;
  ngx_pool_t* pool = resolve->pool;

  moesaic_lookup_done(resolve->lookup, resolve->addresses, resolve->count, resolve->valid_ns, resolve->fault);
  ngx_destroy_pool(pool);
}

/* nginx may call this inside ngx_resolve_name, and it frees the addresses afterwards: they are copied. */
static void moesaic_resolved(ngx_resolver_ctx_t* ctx) {
  moesaic_resolve_t* resolve = ctx->data;
  time_t now = ngx_time();
  ngx_uint_t i;
  u_char* address;

  resolve->valid_ns = ctx->valid > now ? (int64_t)(ctx->valid - now) * 1000000000 : 0;
  if (ctx->state == NGX_OK) {
    resolve->addresses = ngx_palloc(resolve->pool, (ctx->naddrs + 1) * sizeof(moesaic_text_t));
    for (i = 0; resolve->addresses != NULL && i < ctx->naddrs; i++) {
      address = ngx_palloc(resolve->pool, ctx->addrs[i].socklen);
      if (address == NULL) break;
      ngx_memcpy(address, ctx->addrs[i].sockaddr, ctx->addrs[i].socklen);
      resolve->addresses[i].data = (const char*)address;
      resolve->addresses[i].len = ctx->addrs[i].socklen;
    }
    resolve->count = i;
    if (i < ctx->naddrs) {
      resolve->fault.data = "no memory";
      resolve->fault.len = sizeof("no memory") - 1;
    }
  } else if (ctx->state != NGX_RESOLVE_NXDOMAIN) {
    resolve->fault.data = ngx_resolver_strerror(ctx->state);
    resolve->fault.len = ngx_strlen(resolve->fault.data);
  }
  ngx_resolve_name_done(ctx);
  resolve->ctx = NULL;
  ngx_post_event(&resolve->done, &ngx_posted_events);
}

void* moesaic_loop_resolve(void* data, moesaic_text_t name, moesaic_lookup_t* lookup) {
  moesaic_loop_t* loop = data;
  ngx_resolver_t* resolver = moesaic_loop_resolver(loop);
  moesaic_resolve_t* resolve;
  ngx_resolver_ctx_t* ctx;
  ngx_pool_t* pool;

  if (resolver == NULL) return NULL;
  pool = ngx_create_pool(NGX_DEFAULT_POOL_SIZE, ngx_cycle->log);
  if (pool == NULL) return NULL;
  resolve = ngx_pcalloc(pool, sizeof(moesaic_resolve_t));
  ctx = resolve == NULL ? NULL : ngx_resolve_start(resolver, NULL);
  if (ctx == NULL || ctx == NGX_NO_RESOLVER) {
    ngx_destroy_pool(pool);
    return NULL;
  }
  resolve->lookup = lookup;
  resolve->pool = pool;
  resolve->ctx = ctx;
  resolve->done.handler = moesaic_resolve_done;
  resolve->done.data = resolve;
  resolve->done.log = ngx_cycle->log;
  ctx->name.data = ngx_pnalloc(pool, name.len + 1);
  if (ctx->name.data == NULL) {
    ngx_resolve_name_done(ctx);
    ngx_destroy_pool(pool);
    return NULL;
  }
  ngx_memcpy(ctx->name.data, name.data, name.len);
  ctx->name.len = name.len;
  ctx->handler = moesaic_resolved;
  ctx->data = resolve;
  ctx->cancelable = 1; /* a worker that exits need not wait for it */
  ctx->timeout = loop->http->resolver_timeout == NGX_CONF_UNSET_MSEC ? 30000 : loop->http->resolver_timeout;
  if (ngx_resolve_name(ctx) != NGX_OK) { /* the context is freed */
    ngx_destroy_pool(pool);
    return NULL;
  }
  return resolve;
}

void moesaic_loop_cancel_resolve(void* handle) {
  moesaic_resolve_t* resolve = handle;

  if (resolve->ctx != NULL) ngx_resolve_name_done(resolve->ctx);
  if (resolve->done.posted) { /* the macro is several statements */
    ngx_delete_posted_event(&resolve->done);
  }
  ngx_destroy_pool(resolve->pool);
}

void moesaic_loop_log(void* data, int error, moesaic_text_t message) {
  moesaic_loop_t* loop = data;
  ngx_str_t text;

  text.data = (u_char*)message.data;
  text.len = message.len;
  ngx_log_error((ngx_uint_t)(error ? NGX_LOG_ERR : NGX_LOG_NOTICE), ngx_cycle->log, 0, "moesaic %V: %V",
                &loop->name, &text);
}

/* --- Worker processes --- */

/* Registers the worker. It answers 503 until it has succeeded, and it tries again. */
static void moesaic_join(ngx_event_t* event) {
  moesaic_loop_t* loop = event->data;
  moesaic_watch_t* watch;
  char error[512];

  if (ngx_exiting || ngx_terminate) return;
  loop->gateway =
      moesaic_gateway_create(loop->pool, &moesaic_shell, loop, (int32_t)ngx_pid, error, sizeof(error));
  if (loop->gateway != NULL) {
    loop->wake_watch = moesaic_loop_watch(loop, moesaic_gateway_wake_fd(loop->gateway), NULL);
    if (loop->wake_watch != NULL) {
      watch = loop->wake_watch;
      watch->connection->idle = 1; /* nginx calls the handler when the worker is asked to exit */
      moesaic_gateway_soon(loop->gateway);
      return;
    }
    moesaic_gateway_destroy(loop->gateway);
    loop->gateway = NULL;
    ngx_memcpy(error, "no connection is free", sizeof("no connection is free"));
  }
  ngx_log_error(NGX_LOG_ERR, event->log, 0,
                "moesaic_pool %V: this worker answers 503 until it has joined the pool: %s", &loop->name,
                error);
  event->cancelable = 1;
  ngx_add_timer(event, 1000);
}

void moesaic_loop_start(moesaic_loop_t* loop, ngx_cycle_t* cycle) {
  ngx_queue_init(&loop->idle);
  loop->idle_count = 0;
  loop->timer.handler = moesaic_on_timer;
  loop->timer.data = loop;
  loop->timer.log = cycle->log;
  loop->soon.handler = moesaic_on_soon;
  loop->soon.data = loop;
  loop->soon.log = cycle->log;
  loop->join.handler = moesaic_join;
  loop->join.data = loop;
  loop->join.log = cycle->log;
  moesaic_join(&loop->join);
}

void moesaic_loop_stop(moesaic_loop_t* loop) {
  ngx_queue_t* q;

  if (loop->join.timer_set) ngx_del_timer(&loop->join);
  if (loop->gateway == NULL) return;
  if (loop->wake_watch != NULL) moesaic_loop_unwatch(loop->wake_watch);
  moesaic_gateway_destroy(loop->gateway);
  loop->gateway = NULL;
  loop->wake_watch = NULL;
  if (loop->timer.timer_set) ngx_del_timer(&loop->timer);
  while (!ngx_queue_empty(&loop->idle)) {
    q = ngx_queue_head(&loop->idle);
    ngx_queue_remove(q);
    moesaic_close(ngx_queue_data(q, moesaic_connection_t, queue));
  }
}
