/* Requests of clients: reading, answering, pages, and the end. */
#include "proxy/nginx/module.h"

#define MOESAIC_PAUSE_BYTES (1 << 20) /* unsent bytes of an answer at which reading from the engine stops */
#define MOESAIC_MIN_BUFFER 4096

typedef struct {
  ngx_http_request_t* r;
  moesaic_loop_t* loop;
  moesaic_flow_t* flow; /* null: detached */
  ngx_event_t end_event;
  ngx_chain_t *free, *busy;
  moesaic_log_t log;
  unsigned ended : 1, complete : 1, failed : 1, paused : 1, logged : 1;
} moesaic_request_t;

static void moesaic_body_read(ngx_http_request_t* r);
static void moesaic_writer(ngx_http_request_t* r);

static void moesaic_cleanup(void* data) {
  moesaic_request_t* request = data;
  moesaic_flow_t* flow = request->flow;

  if (request->end_event.posted) { /* the macro is several statements */
    ngx_delete_posted_event(&request->end_event);
  }
  if (flow == NULL) return;
  request->flow = NULL;
  moesaic_flow_detach(flow, &request->log);
  request->logged = 1;
}

/* Ends the request outside of calls of the gateway. */
static void moesaic_finalize(ngx_event_t* event) {
  moesaic_request_t* request = event->data;
  ngx_http_request_t* r = request->r;
  ngx_connection_t* c = r->connection;
  ngx_int_t rc = NGX_ERROR;

  if (request->ended && request->complete && !request->failed) rc = ngx_http_send_special(r, NGX_HTTP_LAST);
  ngx_http_finalize_request(r, rc);
  ngx_http_run_posted_requests(c);
}

ngx_int_t moesaic_request_handler(ngx_http_request_t* r, moesaic_loop_t* loop) {
  moesaic_request_t* request;
  ngx_http_cleanup_t* cleanup;
  ngx_int_t rc;

  if (loop->gateway == NULL) return NGX_HTTP_SERVICE_UNAVAILABLE;
  request = ngx_pcalloc(r->pool, sizeof(moesaic_request_t));
  if (request == NULL) return NGX_HTTP_INTERNAL_SERVER_ERROR;
  cleanup = ngx_http_cleanup_add(r, 0);
  if (cleanup == NULL) return NGX_HTTP_INTERNAL_SERVER_ERROR;
  request->r = r;
  request->loop = loop;
  request->end_event.handler = moesaic_finalize;
  request->end_event.data = request;
  request->end_event.log = r->connection->log;
  cleanup->handler = moesaic_cleanup;
  cleanup->data = request;
  ngx_http_set_ctx(r, request, ngx_http_moesaic_module);

  rc = ngx_http_read_client_request_body(r, moesaic_body_read);
  return rc >= NGX_HTTP_SPECIAL_RESPONSE ? rc : NGX_DONE;
}

/* The buffers of a body, if all are in memory; NGX_DECLINED otherwise. */
static ngx_int_t moesaic_body_parts(ngx_http_request_t* r, moesaic_text_t** parts, size_t* count) {
  ngx_chain_t *cl, *first;
  size_t i = 0;

  first = r->request_body != NULL ? r->request_body->bufs : NULL;
  for (cl = first; cl != NULL; cl = cl->next) {
    if (ngx_buf_size(cl->buf) != 0 && !ngx_buf_in_memory(cl->buf)) return NGX_DECLINED;
    i++;
  }
  *count = i;
  *parts = ngx_palloc(r->pool, (i + 1) * sizeof(moesaic_text_t));
  if (*parts == NULL) return NGX_ERROR;
  for (cl = first, i = 0; cl != NULL; cl = cl->next, i++) {
    (*parts)[i].data = (const char*)cl->buf->pos;
    (*parts)[i].len = (size_t)ngx_buf_size(cl->buf);
  }
  return NGX_OK;
}

/* Joins the body, which may be in several buffers and in a temporary file. */
static ngx_int_t moesaic_join_body(ngx_http_request_t* r, moesaic_text_t* body) {
  ngx_chain_t* cl;
  ngx_buf_t* buf;
  u_char* p;
  size_t size = 0;
  ssize_t n;

  body->data = "";
  body->len = 0;
  if (r->request_body == NULL || r->request_body->bufs == NULL) return NGX_OK;
  for (cl = r->request_body->bufs; cl != NULL; cl = cl->next) size += (size_t)ngx_buf_size(cl->buf);
  buf = r->request_body->bufs->buf;
  if (r->request_body->bufs->next == NULL && ngx_buf_in_memory(buf)) {
    body->data = (char*)buf->pos;
    body->len = size;
    return NGX_OK;
  }
  p = ngx_palloc(r->pool, size > 0 ? size : 1);
  if (p == NULL) return NGX_ERROR;
  body->data = (char*)p;
  body->len = size;
  for (cl = r->request_body->bufs; cl != NULL; cl = cl->next) {
    buf = cl->buf;
    if (ngx_buf_size(buf) == 0) continue; /* of an empty body */
    if (ngx_buf_in_memory(buf)) {
      p = ngx_cpymem(p, buf->pos, buf->last - buf->pos);
      continue;
    }
    n = ngx_read_file(buf->file, p, (size_t)(buf->file_last - buf->file_pos), buf->file_pos);
    if (n != buf->file_last - buf->file_pos) return NGX_ERROR;
    p += n;
  }
  return NGX_OK;
}

static moesaic_text_t moesaic_text(const ngx_str_t* text) {
  moesaic_text_t view;
  view.data = (const char*)text->data;
  view.len = text->len;
  return view;
}

static void moesaic_body_read(ngx_http_request_t* r) {
  moesaic_request_t* request = ngx_http_get_module_ctx(r, ngx_http_moesaic_module);
  ngx_connection_t* c = r->connection;
  ngx_list_part_t* part;
  ngx_table_elt_t* elts;
  moesaic_header_t* headers;
  moesaic_text_t body, *parts;
  ngx_uint_t i, count = 0;
  size_t num_parts;
  ngx_int_t rc;

  for (part = &r->headers_in.headers.part; part != NULL; part = part->next) count += part->nelts;
  headers = ngx_palloc(r->pool, (count + 1) * sizeof(moesaic_header_t));
  rc = moesaic_body_parts(r, &parts, &num_parts);
  if (rc == NGX_DECLINED) {
    rc = moesaic_join_body(r, &body);
    parts = &body;
    num_parts = 1;
  }
  if (headers == NULL || rc != NGX_OK) {
    ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
    return;
  }
  count = 0;
  for (part = &r->headers_in.headers.part; part != NULL; part = part->next) {
    elts = part->elts;
    for (i = 0; i < part->nelts; i++) {
      if (elts[i].hash == 0) continue;
      headers[count].name.data = (const char*)elts[i].lowcase_key;
      headers[count].name.len = elts[i].key.len;
      headers[count].value = moesaic_text(&elts[i].value);
      count++;
    }
  }
  /* nginx notices a client that leaves. */
  r->read_event_handler = ngx_http_test_reading;
  r->write_event_handler = moesaic_writer;
  if ((ngx_event_flags & NGX_USE_CLEAR_EVENT) && !c->write->active &&
      ngx_add_event(c->write, NGX_WRITE_EVENT, NGX_CLEAR_EVENT) == NGX_ERROR) {
    ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
    return;
  }
  request->flow = moesaic_flow_create(request->loop->gateway, request);
  if (request->flow == NULL) {
    ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
    return;
  }
  moesaic_flow_start(request->flow, moesaic_text(&r->method_name), moesaic_text(&r->unparsed_uri),
                     moesaic_text(&r->uri), headers, count, parts, num_parts);
}

/* --- The answer --- */

static void moesaic_fail(moesaic_request_t* request) {
  request->failed = 1;
  ngx_post_event(&request->end_event, &ngx_posted_events);
}

static ngx_int_t moesaic_copy(ngx_pool_t* pool, moesaic_text_t text, ngx_str_t* copy) {
  copy->data = ngx_pnalloc(pool, text.len + 1);
  if (copy->data == NULL) return NGX_ERROR;
  ngx_memcpy(copy->data, text.data, text.len);
  copy->data[text.len] = '\0';
  copy->len = text.len;
  return NGX_OK;
}

static int moesaic_is(moesaic_text_t name, const char* word) {
  return name.len == ngx_strlen(word) && ngx_strncasecmp((u_char*)name.data, (u_char*)word, name.len) == 0;
}

static ngx_int_t moesaic_set_header(ngx_http_request_t* r, const moesaic_header_t* header) {
  ngx_table_elt_t* elt;
  ngx_str_t value;

  if (moesaic_copy(r->pool, header->value, &value) != NGX_OK) return NGX_ERROR;
  if (moesaic_is(header->name, "content-type")) {
    r->headers_out.content_type = value;
    r->headers_out.content_type_len = value.len;
    r->headers_out.content_type_lowcase = NULL;
    return NGX_OK;
  }
  if (moesaic_is(header->name, "content-length")) {
    r->headers_out.content_length_n = ngx_atoof(value.data, value.len);
    return NGX_OK;
  }
  elt = ngx_list_push(&r->headers_out.headers);
  if (elt == NULL || moesaic_copy(r->pool, header->name, &elt->key) != NGX_OK) return NGX_ERROR;
  elt->value = value;
  elt->hash = 1;
  elt->lowcase_key = elt->key.data;
  return NGX_OK;
}

void moesaic_client_send_head(void* client, int status, const moesaic_header_t* headers, size_t count) {
  moesaic_request_t* request = client;
  ngx_http_request_t* r = request->r;
  ngx_int_t rc;
  size_t i;

  r->headers_out.status = (ngx_uint_t)status;
  r->headers_out.content_length_n = -1;
  for (i = 0; i < count; i++) {
    if (moesaic_set_header(r, &headers[i]) != NGX_OK) {
      moesaic_fail(request);
      return;
    }
  }
  rc = ngx_http_send_header(r);
  if (rc == NGX_ERROR || rc > NGX_OK) moesaic_fail(request);
}

static size_t moesaic_busy_bytes(moesaic_request_t* request) {
  ngx_chain_t* cl;
  size_t bytes = 0;

  for (cl = request->busy; cl != NULL; cl = cl->next) bytes += (size_t)ngx_buf_size(cl->buf);
  return bytes;
}

/* Stops or resumes reading from the engine, and limits the time in which a client takes bytes. */
static void moesaic_flow_control(moesaic_request_t* request) {
  ngx_http_request_t* r = request->r;
  ngx_connection_t* c = r->connection;
  ngx_http_core_loc_conf_t* clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);
  size_t bytes = moesaic_busy_bytes(request);

  if (request->paused ? bytes < MOESAIC_PAUSE_BYTES / 2 : bytes > MOESAIC_PAUSE_BYTES) {
    request->paused = !request->paused;
    moesaic_flow_pause(request->flow, request->paused);
  }
  if (r != r->connection->data && !r->stream) return;
  if (c->buffered && !c->write->ready) {
    if (!c->write->timer_set) ngx_add_timer(c->write, clcf->send_timeout);
    if (ngx_handle_write_event(c->write, clcf->send_lowat) != NGX_OK) moesaic_fail(request);
  } else if (c->write->timer_set) {
    ngx_del_timer(c->write);
  }
}

void moesaic_client_send_body(void* client, moesaic_text_t bytes) {
  moesaic_request_t* request = client;
  ngx_http_request_t* r = request->r;
  ngx_chain_t *out, **link;
  ngx_buf_t* buf;
  size_t size;

  if (request->failed || request->ended || bytes.len == 0 || r->header_only) return;
  /* A sent buffer that is large enough, or a new one. */
  out = NULL;
  for (link = &request->free; *link != NULL; link = &(*link)->next) {
    if ((size_t)((*link)->buf->end - (*link)->buf->start) >= bytes.len) {
      out = *link;
      *link = out->next;
      break;
    }
  }
  if (out == NULL) {
    out = ngx_alloc_chain_link(r->pool);
    for (size = MOESAIC_MIN_BUFFER; size < bytes.len; size *= 2) { /* void */
    }
    buf = ngx_create_temp_buf(r->pool, size);
    if (out == NULL || buf == NULL) {
      moesaic_fail(request);
      return;
    }
    buf->tag = (ngx_buf_tag_t)&ngx_http_moesaic_module;
    out->buf = buf;
  }
  out->next = NULL;
  buf = out->buf;
  buf->pos = buf->start;
  buf->last = ngx_cpymem(buf->start, bytes.data, bytes.len);
  buf->flush = 1;
  buf->memory = 0;
  buf->temporary = 1;
  if (ngx_http_output_filter(r, out) == NGX_ERROR) {
    moesaic_fail(request);
    return;
  }
  ngx_chain_update_chains(r->pool, &request->free, &request->busy, &out,
                          (ngx_buf_tag_t)&ngx_http_moesaic_module);
  moesaic_flow_control(request);
}

void moesaic_client_end(void* client, int complete) {
  moesaic_request_t* request = client;

  request->ended = 1;
  request->complete = complete ? 1 : 0;
  ngx_post_event(&request->end_event, &ngx_posted_events);
}

/* The client takes bytes again. */
static void moesaic_writer(ngx_http_request_t* r) {
  moesaic_request_t* request = ngx_http_get_module_ctx(r, ngx_http_moesaic_module);
  ngx_connection_t* c = r->connection;
  ngx_chain_t* none = NULL;

  if (c->write->timedout) {
    c->timedout = 1;
    ngx_http_finalize_request(r, NGX_HTTP_REQUEST_TIME_OUT);
    return;
  }
  if (request == NULL || request->flow == NULL || !r->header_sent) return;
  if (ngx_http_output_filter(r, NULL) == NGX_ERROR) {
    ngx_http_finalize_request(r, NGX_ERROR);
    return;
  }
  ngx_chain_update_chains(r->pool, &request->free, &request->busy, &none,
                          (ngx_buf_tag_t)&ngx_http_moesaic_module);
  moesaic_flow_control(request);
}

/* --- Threads --- */

typedef struct {
  ngx_thread_task_t task; /* first: it is freed as this */
  moesaic_task_t* work;
} moesaic_thread_task_t;

static void moesaic_thread(void* data, ngx_log_t* log) {
  moesaic_thread_task_t* task = data;
  moesaic_task_run(task->work);
}

static void moesaic_thread_done(ngx_event_t* event) {
  moesaic_thread_task_t* task = event->data;
  moesaic_task_t* work = task->work;

  ngx_free(task);
  moesaic_task_done(work);
}

int moesaic_client_prepare(void* client, moesaic_task_t* work) {
  moesaic_request_t* request = client;
  moesaic_thread_task_t* task;

  if (request->loop->threads == NULL) return 0;
  task = ngx_calloc(sizeof(moesaic_thread_task_t), ngx_cycle->log);
  if (task == NULL) return 0;
  task->work = work;
  task->task.ctx = task;
  task->task.handler = moesaic_thread;
  task->task.event.data = task;
  task->task.event.handler = moesaic_thread_done;
  task->task.event.log = ngx_cycle->log;
  if (ngx_thread_task_post(request->loop->threads, &task->task) == NGX_OK) return 1;
  ngx_free(task);
  return 0;
}

/* --- Pages --- */

static void moesaic_free_text(void* data) { moesaic_free(data); }

static ngx_int_t moesaic_send_text(ngx_http_request_t* r, ngx_uint_t status, const char* type, u_char* text,
                                   size_t len) {
  ngx_chain_t out;
  ngx_buf_t* buf;
  ngx_int_t rc;

  r->headers_out.status = status;
  r->headers_out.content_type.data = (u_char*)type;
  r->headers_out.content_type.len = r->headers_out.content_type_len = ngx_strlen(type);
  r->headers_out.content_type_lowcase = NULL;
  r->headers_out.content_length_n = (off_t)len;
  rc = ngx_http_send_header(r);
  if (rc == NGX_ERROR || rc > NGX_OK || r->header_only) return rc;
  buf = ngx_calloc_buf(r->pool);
  if (buf == NULL) return NGX_HTTP_INTERNAL_SERVER_ERROR;
  buf->pos = buf->start = text;
  buf->last = buf->end = text + len;
  buf->memory = len > 0;
  buf->last_buf = 1;
  out.buf = buf;
  out.next = NULL;
  return ngx_http_output_filter(r, &out);
}

/* Sends a text of the bridge, which is freed with the request. */
static ngx_int_t moesaic_send_owned(ngx_http_request_t* r, ngx_uint_t status, const char* type, char* text,
                                    size_t len) {
  ngx_pool_cleanup_t* cleanup = ngx_pool_cleanup_add(r->pool, 0);

  if (cleanup == NULL) {
    moesaic_free(text);
    return NGX_HTTP_INTERNAL_SERVER_ERROR;
  }
  cleanup->handler = moesaic_free_text;
  cleanup->data = text;
  return moesaic_send_text(r, status, type, (u_char*)text, len);
}

ngx_int_t moesaic_page_handler(ngx_http_request_t* r, moesaic_loop_t* loop, int kind) {
  const char* type;
  ngx_int_t rc;
  char* text;
  size_t len;

  if (!(r->method & (NGX_HTTP_GET | NGX_HTTP_HEAD))) return NGX_HTTP_NOT_ALLOWED;
  rc = ngx_http_discard_request_body(r);
  if (rc != NGX_OK) return rc;
  if (loop->gateway == NULL) return NGX_HTTP_SERVICE_UNAVAILABLE;
  if (kind == MOESAIC_PAGE && r->args.len == 5 && ngx_strncmp(r->args.data, "state", 5) == 0)
    kind = MOESAIC_STATE;
  if (kind == MOESAIC_PAGE && r->args.len == 5 && ngx_strncmp(r->args.data, "trace", 5) == 0)
    kind = MOESAIC_TRACE;
  if ((kind == MOESAIC_PAGE || kind == MOESAIC_STATE) && r->args.len == 5 &&
      ngx_strncmp(r->args.data, "check", 5) == 0) {
    kind = MOESAIC_CHECK;
  }
  if (!moesaic_render(loop->gateway, kind, &text, &len, &type)) return NGX_HTTP_INTERNAL_SERVER_ERROR;
  return moesaic_send_owned(r, NGX_HTTP_OK, type, text, len);
}

/* Pages of other sites could send such a request from an operator's browser, which names its origin then. */
static int moesaic_has_origin(ngx_http_request_t* r) {
  ngx_list_part_t* part;
  ngx_table_elt_t* elts;
  ngx_uint_t i;

  for (part = &r->headers_in.headers.part; part != NULL; part = part->next) {
    elts = part->elts;
    for (i = 0; i < part->nelts; i++) {
      if (elts[i].hash != 0 && elts[i].key.len == 6 && ngx_strncmp(elts[i].lowcase_key, "origin", 6) == 0)
        return 1;
    }
  }
  return 0;
}

ngx_int_t moesaic_engines_handler(ngx_http_request_t* r, moesaic_loop_t* loop) {
  ngx_int_t rc;
  char* text = NULL;
  size_t len = 0;
  int status;

  if (r->method != NGX_HTTP_POST) return NGX_HTTP_NOT_ALLOWED;
  if (moesaic_has_origin(r)) return NGX_HTTP_FORBIDDEN;
  rc = ngx_http_discard_request_body(r);
  if (rc != NGX_OK) return rc;
  if (loop->gateway == NULL) return NGX_HTTP_SERVICE_UNAVAILABLE;
  status = moesaic_engines(loop->gateway, moesaic_text(&r->args), &text, &len);
  if (status == 0) return NGX_HTTP_INTERNAL_SERVER_ERROR;
  return moesaic_send_owned(r, (ngx_uint_t)status, "application/json", text, len);
}

static void moesaic_metaserver_read(ngx_http_request_t* r) {
  moesaic_loop_t* loop = ngx_http_get_module_ctx(r, ngx_http_moesaic_module);
  moesaic_text_t body;
  ngx_uint_t status;

  if (moesaic_join_body(r, &body) != NGX_OK) {
    ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
    return;
  }
  status = (ngx_uint_t)moesaic_metaserver(loop->gateway, body);
  ngx_http_set_ctx(r, NULL, ngx_http_moesaic_module);
  ngx_http_finalize_request(r, moesaic_send_text(r, status, "application/json", (u_char*)"{}\n", 3));
}

ngx_int_t moesaic_metaserver_handler(ngx_http_request_t* r, moesaic_loop_t* loop) {
  moesaic_text_t address;
  ngx_int_t rc;

  if (r->method != NGX_HTTP_POST) return NGX_HTTP_NOT_ALLOWED;
  if (loop->gateway == NULL) return NGX_HTTP_SERVICE_UNAVAILABLE;
  address.data = (const char*)r->connection->sockaddr;
  address.len = r->connection->socklen;
  if (!moesaic_metaserver_allows(loop->gateway, address)) return NGX_HTTP_FORBIDDEN;
  ngx_http_set_ctx(r, loop, ngx_http_moesaic_module);
  rc = ngx_http_read_client_request_body(r, moesaic_metaserver_read);
  return rc >= NGX_HTTP_SPECIAL_RESPONSE ? rc : NGX_DONE;
}

const moesaic_log_t* moesaic_request_log(ngx_http_request_t* r) {
  moesaic_request_t* request = ngx_http_get_module_ctx(r, ngx_http_moesaic_module);
  return request != NULL && request->logged ? &request->log : NULL;
}
