/* The nginx module: directives, variables, shared memory and processes. */
#include "proxy/nginx/module.h"

typedef struct {
  ngx_array_t pools; /* of moesaic_loop_t* */
} moesaic_main_conf_t;

enum {
  MOESAIC_KIND_NONE,
  MOESAIC_KIND_PASS,
  MOESAIC_KIND_METASERVER,
  MOESAIC_KIND_ENGINES,
  MOESAIC_KIND_RENDER
};

typedef struct {
  ngx_uint_t kind;
  int page; /* for MOESAIC_KIND_RENDER */
  moesaic_loop_t* loop;
} moesaic_loc_conf_t;

const moesaic_shell_t moesaic_shell = {
    .connect = moesaic_loop_connect,
    .release = moesaic_loop_release,
    .pause = moesaic_loop_pause,
    .arm_timer = moesaic_loop_arm_timer,
    .run_soon = moesaic_loop_run_soon,
    .watch = moesaic_loop_watch,
    .unwatch = moesaic_loop_unwatch,
    .resolve = moesaic_loop_resolve,
    .cancel_resolve = moesaic_loop_cancel_resolve,
    .log = moesaic_loop_log,
    .send_head = moesaic_client_send_head,
    .send_body = moesaic_client_send_body,
    .end = moesaic_client_end,
    .prepare = moesaic_client_prepare,
};

/* --- Handlers --- */

static ngx_int_t moesaic_handler(ngx_http_request_t* r) {
  moesaic_loc_conf_t* conf = ngx_http_get_module_loc_conf(r, ngx_http_moesaic_module);

  switch (conf->kind) {
    case MOESAIC_KIND_PASS:
      return moesaic_request_handler(r, conf->loop);
    case MOESAIC_KIND_METASERVER:
      return moesaic_metaserver_handler(r, conf->loop);
    case MOESAIC_KIND_ENGINES:
      return moesaic_engines_handler(r, conf->loop);
    case MOESAIC_KIND_RENDER:
      return moesaic_page_handler(r, conf->loop, conf->page);
    default:
      return NGX_DECLINED;
  }
}

/* --- Directives --- */

static moesaic_loop_t* moesaic_find_pool(moesaic_main_conf_t* conf, const ngx_str_t* name) {
  moesaic_loop_t** pools = conf->pools.elts;
  ngx_uint_t i;

  for (i = 0; i < conf->pools.nelts; i++) {
    if (pools[i]->name.len == name->len && ngx_strncmp(pools[i]->name.data, name->data, name->len) == 0)
      return pools[i];
  }
  return NULL;
}

static void moesaic_destroy_pool(void* data) { moesaic_pool_destroy(data); }

/* One directive inside a block. The gateway knows them all. */
static char* moesaic_pool_directive(ngx_conf_t* cf, ngx_command_t* dummy, void* data) {
  moesaic_loop_t* loop = data;
  ngx_str_t* words = cf->args->elts;
  moesaic_text_t texts[64];
  char error[512];
  ngx_uint_t i;

  if (ngx_strcmp(words[0].data, "include") == 0) return ngx_conf_include(cf, dummy, data);
  if (cf->args->nelts > 64) return "has too many values";
  for (i = 0; i < cf->args->nelts; i++) {
    texts[i].data = (const char*)words[i].data;
    texts[i].len = words[i].len;
  }
  if (moesaic_pool_set(loop->pool, texts, cf->args->nelts, error, sizeof(error))) return NGX_CONF_OK;
  ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "%s", error);
  return NGX_CONF_ERROR;
}

static ngx_int_t moesaic_init_zone(ngx_shm_zone_t* zone, void* data);

/* moesaic_pool NAME { ... } */
static char* moesaic_pool_block(ngx_conf_t* cf, ngx_command_t* cmd, void* data) {
  moesaic_main_conf_t* conf = data;
  ngx_str_t* words = cf->args->elts;
  ngx_str_t zone_name, threads = ngx_string("default");
  ngx_pool_cleanup_t* cleanup;
  moesaic_text_t name;
  moesaic_loop_t *loop, **added;
  ngx_conf_t save;
  char error[512];
  char* rv;

  if (moesaic_find_pool(conf, &words[1]) != NULL) return "is duplicate";
  loop = ngx_pcalloc(cf->pool, sizeof(moesaic_loop_t));
  cleanup = ngx_pool_cleanup_add(cf->pool, 0);
  added = ngx_array_push(&conf->pools);
  if (loop == NULL || cleanup == NULL || added == NULL) return NGX_CONF_ERROR;
  *added = loop;
  loop->name = words[1];
  name.data = (const char*)words[1].data;
  name.len = words[1].len;
  loop->pool = moesaic_pool_create(name);
  if (loop->pool == NULL) return NGX_CONF_ERROR;
  cleanup->handler = moesaic_destroy_pool;
  cleanup->data = loop->pool;

  save = *cf;
  cf->handler = moesaic_pool_directive;
  cf->handler_conf = (void*)loop;
  rv = ngx_conf_parse(cf, NULL);
  *cf = save;
  if (rv != NGX_CONF_OK) return rv;
  if (!moesaic_pool_finish(loop->pool, error, sizeof(error))) {
    ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "%s", error);
    return NGX_CONF_ERROR;
  }
  loop->threads = ngx_thread_pool_add(cf, &threads);
  loop->http = ngx_http_conf_get_module_loc_conf(cf, ngx_http_core_module);

  zone_name.len = loop->name.len + sizeof("moesaic_") - 1;
  zone_name.data = ngx_pnalloc(cf->pool, zone_name.len);
  if (zone_name.data == NULL) return NGX_CONF_ERROR;
  ngx_sprintf(zone_name.data, "moesaic_%V", &loop->name);
  /* nginx's allocator keeps a table of pages in front of them. */
  loop->zone = ngx_shared_memory_add(
      cf, &zone_name, moesaic_pool_zone_bytes(loop->pool) / 100 * 102 + (1 << 16), &ngx_http_moesaic_module);
  if (loop->zone == NULL) return NGX_CONF_ERROR;
  loop->zone->init = moesaic_init_zone;
  loop->zone->data = loop;
  return NGX_CONF_OK;
}

static char* moesaic_location(ngx_conf_t* cf, ngx_command_t* cmd, void* data) {
  moesaic_loc_conf_t* conf = data;
  moesaic_main_conf_t* main = ngx_http_conf_get_module_main_conf(cf, ngx_http_moesaic_module);
  ngx_http_core_loc_conf_t* clcf = ngx_http_conf_get_module_loc_conf(cf, ngx_http_core_module);
  ngx_str_t* words = cf->args->elts;
  ngx_str_t* name = cmd->post;

  if (conf->kind != MOESAIC_KIND_NONE) return "shares its location with another moesaic directive";
  conf->loop = moesaic_find_pool(main, &words[1]);
  if (conf->loop == NULL) {
    ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "there is no moesaic_pool \"%V\" before this line", &words[1]);
    return NGX_CONF_ERROR;
  }
  conf->kind = cmd->offset;
  conf->page = name == NULL ? 0 : (int)name->len;
  clcf->handler = moesaic_handler;
  return NGX_CONF_OK;
}

/* The page that a directive renders, as the length of an empty text. */
static ngx_str_t moesaic_page_metrics = {MOESAIC_METRICS, NULL}, moesaic_page_state = {MOESAIC_STATE, NULL},
                 moesaic_page_live = {MOESAIC_PAGE, NULL}, moesaic_page_trace = {MOESAIC_TRACE, NULL};

#define MOESAIC_LOCATION (NGX_HTTP_LOC_CONF | NGX_HTTP_LIF_CONF | NGX_CONF_TAKE1)

static ngx_command_t moesaic_commands[] = {
    {ngx_string("moesaic_pool"), NGX_HTTP_MAIN_CONF | NGX_CONF_BLOCK | NGX_CONF_TAKE1, moesaic_pool_block,
     NGX_HTTP_MAIN_CONF_OFFSET, 0, NULL},
    {ngx_string("moesaic_pass"), MOESAIC_LOCATION, moesaic_location, NGX_HTTP_LOC_CONF_OFFSET,
     MOESAIC_KIND_PASS, NULL},
    {ngx_string("moesaic_metaserver"), MOESAIC_LOCATION, moesaic_location, NGX_HTTP_LOC_CONF_OFFSET,
     MOESAIC_KIND_METASERVER, NULL},
    {ngx_string("moesaic_engines"), MOESAIC_LOCATION, moesaic_location, NGX_HTTP_LOC_CONF_OFFSET,
     MOESAIC_KIND_ENGINES, NULL},
    {ngx_string("moesaic_metrics"), MOESAIC_LOCATION, moesaic_location, NGX_HTTP_LOC_CONF_OFFSET,
     MOESAIC_KIND_RENDER, &moesaic_page_metrics},
    {ngx_string("moesaic_state"), MOESAIC_LOCATION, moesaic_location, NGX_HTTP_LOC_CONF_OFFSET,
     MOESAIC_KIND_RENDER, &moesaic_page_state},
    {ngx_string("moesaic_page"), MOESAIC_LOCATION, moesaic_location, NGX_HTTP_LOC_CONF_OFFSET,
     MOESAIC_KIND_RENDER, &moesaic_page_live},
    {ngx_string("moesaic_trace"), MOESAIC_LOCATION, moesaic_location, NGX_HTTP_LOC_CONF_OFFSET,
     MOESAIC_KIND_RENDER, &moesaic_page_trace},
    ngx_null_command};

static void* moesaic_create_main_conf(ngx_conf_t* cf) {
  moesaic_main_conf_t* conf = ngx_pcalloc(cf->pool, sizeof(moesaic_main_conf_t));

  if (conf == NULL || ngx_array_init(&conf->pools, cf->pool, 2, sizeof(moesaic_loop_t*)) != NGX_OK)
    return NULL;
  return conf;
}

static void* moesaic_create_loc_conf(ngx_conf_t* cf) {
  return ngx_pcalloc(cf->pool, sizeof(moesaic_loc_conf_t));
}

static char* moesaic_merge_loc_conf(ngx_conf_t* cf, void* parent, void* child) {
  moesaic_loc_conf_t *outer = parent, *conf = child;

  /* Blocks of "if" run the handler of their location. */
  if (conf->kind == MOESAIC_KIND_NONE && outer->kind != MOESAIC_KIND_NONE) *conf = *outer;
  return NGX_CONF_OK;
}

/* --- Variables --- */

enum {
  MOESAIC_VAR_STAGE = 0, /* to MOESAIC_STAGES - 1 */
  MOESAIC_VAR_TTFT = MOESAIC_STAGES,
  MOESAIC_VAR_PROMPT,
  MOESAIC_VAR_MATCHED,
  MOESAIC_VAR_CACHED,
  MOESAIC_VAR_OUTPUT,
  MOESAIC_VAR_RETRIES,
  MOESAIC_VAR_OUTCOME,
  MOESAIC_VAR_PREFILL,
  MOESAIC_VAR_DECODE,
  MOESAIC_VAR_ID,
  MOESAIC_VAR_KEY
};

static ngx_int_t moesaic_variable(ngx_http_request_t* r, ngx_http_variable_value_t* v, uintptr_t data) {
  moesaic_loc_conf_t* conf = ngx_http_get_module_loc_conf(r, ngx_http_moesaic_module);
  const moesaic_log_t* log = conf->kind == MOESAIC_KIND_PASS ? moesaic_request_log(r) : NULL;
  const char* text = NULL;
  int64_t number = -1, at = 0;
  u_char* p;

  if (log == NULL) {
    v->not_found = 1;
    return NGX_OK;
  }
  if (data <= MOESAIC_VAR_TTFT) { /* milliseconds since the request was received */
    at = data == MOESAIC_VAR_TTFT ? log->first_token : log->entered[data];
    if (at == 0 || log->entered[0] == 0) {
      v->not_found = 1;
      return NGX_OK;
    }
    number = (at - log->entered[0]) / 1000;
    p = ngx_pnalloc(r->pool, NGX_INT64_LEN + 5);
    if (p == NULL) return NGX_ERROR;
    v->data = p;
    v->len = (unsigned)(ngx_sprintf(p, "%L.%03L", number / 1000, number % 1000) - p);
  } else if (data <= MOESAIC_VAR_RETRIES) {
    number = data == MOESAIC_VAR_PROMPT    ? log->prompt_tokens
             : data == MOESAIC_VAR_MATCHED ? log->matched_tokens
             : data == MOESAIC_VAR_CACHED  ? log->cached_tokens
             : data == MOESAIC_VAR_OUTPUT  ? log->output_tokens
                                           : log->retries;
    p = ngx_pnalloc(r->pool, NGX_INT64_LEN);
    if (p == NULL) return NGX_ERROR;
    v->data = p;
    v->len = (unsigned)(ngx_sprintf(p, "%L", number) - p);
  } else {
    text = data == MOESAIC_VAR_OUTCOME   ? log->outcome
           : data == MOESAIC_VAR_PREFILL ? log->prefill
           : data == MOESAIC_VAR_DECODE  ? log->decode
           : data == MOESAIC_VAR_ID      ? log->request_id
                                         : log->key_name;
    v->data = (u_char*)text;
    v->len = (unsigned)ngx_strlen(text);
    if (v->len == 0) {
      v->not_found = 1;
      return NGX_OK;
    }
  }
  v->valid = 1;
  v->no_cacheable = 1;
  v->not_found = 0;
  return NGX_OK;
}

#define MOESAIC_VARIABLE(name, data) \
  { ngx_string("moesaic_" name), NULL, moesaic_variable, data, NGX_HTTP_VAR_NOCACHEABLE, 0 }

static ngx_http_variable_t moesaic_variables[] = {MOESAIC_VARIABLE("received", 0),
                                                  MOESAIC_VARIABLE("tokenized", 1),
                                                  MOESAIC_VARIABLE("prefix_matched", 2),
                                                  MOESAIC_VARIABLE("prefill_waiting", 3),
                                                  MOESAIC_VARIABLE("prefill_scheduled", 4),
                                                  MOESAIC_VARIABLE("prefill_running", 5),
                                                  MOESAIC_VARIABLE("decode_waiting", 6),
                                                  MOESAIC_VARIABLE("decode_scheduled", 7),
                                                  MOESAIC_VARIABLE("decode_running", 8),
                                                  MOESAIC_VARIABLE("done", 9),
                                                  MOESAIC_VARIABLE("ttft", MOESAIC_VAR_TTFT),
                                                  MOESAIC_VARIABLE("prompt_tokens", MOESAIC_VAR_PROMPT),
                                                  MOESAIC_VARIABLE("matched_tokens", MOESAIC_VAR_MATCHED),
                                                  MOESAIC_VARIABLE("cached_tokens", MOESAIC_VAR_CACHED),
                                                  MOESAIC_VARIABLE("output_tokens", MOESAIC_VAR_OUTPUT),
                                                  MOESAIC_VARIABLE("retries", MOESAIC_VAR_RETRIES),
                                                  MOESAIC_VARIABLE("outcome", MOESAIC_VAR_OUTCOME),
                                                  MOESAIC_VARIABLE("prefill_engine", MOESAIC_VAR_PREFILL),
                                                  MOESAIC_VARIABLE("decode_engine", MOESAIC_VAR_DECODE),
                                                  MOESAIC_VARIABLE("request_id", MOESAIC_VAR_ID),
                                                  MOESAIC_VARIABLE("key_name", MOESAIC_VAR_KEY),
                                                  ngx_http_null_variable};

static ngx_int_t moesaic_preconfiguration(ngx_conf_t* cf) {
  ngx_http_variable_t *variable, *v;

  for (v = moesaic_variables; v->name.len > 0; v++) {
    variable = ngx_http_add_variable(cf, &v->name, v->flags);
    if (variable == NULL) return NGX_ERROR;
    variable->get_handler = v->get_handler;
    variable->data = v->data;
  }
  return NGX_OK;
}

/* The resolver may be set after the pool. */
static ngx_int_t moesaic_postconfiguration(ngx_conf_t* cf) {
  moesaic_main_conf_t* conf = ngx_http_conf_get_module_main_conf(cf, ngx_http_moesaic_module);
  moesaic_loop_t** pools = conf->pools.elts;
  ngx_uint_t i;

  for (i = 0; i < conf->pools.nelts; i++) {
    if (!moesaic_pool_resolves(pools[i]->pool) || moesaic_loop_resolver(pools[i]) != NULL) continue;
    ngx_log_error(NGX_LOG_EMERG, cf->log, 0,
                  "moesaic_pool %V: engines with \"resolve\" need \"resolver\" in the http block",
                  &pools[i]->name);
    return NGX_ERROR;
  }
  return NGX_OK;
}

/* --- Shared memory and processes --- */

/* Uses all pages of the zone as one region. */
static ngx_int_t moesaic_init_zone(ngx_shm_zone_t* zone, void* data) {
  moesaic_loop_t* loop = zone->data;
  ngx_slab_pool_t* slab = (ngx_slab_pool_t*)zone->shm.addr;
  size_t bytes = moesaic_pool_zone_bytes(loop->pool);
  int formatted = data != NULL || zone->shm.exists;
  char error[512], note[256];

  if (!formatted || slab->data == NULL) {
    formatted = 0;
    slab->data = ngx_slab_alloc(slab, bytes);
    if (slab->data == NULL) {
      ngx_log_error(NGX_LOG_EMERG, zone->shm.log, 0, "moesaic_pool %V: zone of %uz bytes does not fit",
                    &loop->name, bytes);
      return NGX_ERROR;
    }
  }
  if (moesaic_pool_attach(loop->pool, slab->data, bytes, formatted, note, sizeof(note), error,
                          sizeof(error))) {
    if (note[0] != '\0')
      ngx_log_error(NGX_LOG_WARN, zone->shm.log, 0, "moesaic_pool %V: %s", &loop->name, note);
    return NGX_OK;
  }
  ngx_log_error(NGX_LOG_EMERG, zone->shm.log, 0, "moesaic_pool %V: %s", &loop->name, error);
  return NGX_ERROR;
}

static moesaic_main_conf_t* moesaic_main_conf(ngx_cycle_t* cycle) {
  if (ngx_get_conf(cycle->conf_ctx, ngx_http_module) == NULL) return NULL;
  return ngx_http_cycle_get_module_main_conf(cycle, ngx_http_moesaic_module);
}

/* The configuration is accepted: its engines replace those of the last one. An error here would end nginx, so
 * the old engines stay instead. moesaic_init_zone has refused configurations that do not fit. */
static ngx_int_t moesaic_init_module(ngx_cycle_t* cycle) {
  moesaic_main_conf_t* conf = moesaic_main_conf(cycle);
  moesaic_loop_t** pools;
  char error[512];
  ngx_uint_t i;

  if (conf == NULL || ngx_test_config) return NGX_OK;
  pools = conf->pools.elts;
  for (i = 0; i < conf->pools.nelts; i++) {
    if (moesaic_pool_configure(pools[i]->pool, error, sizeof(error))) continue;
    ngx_log_error(NGX_LOG_ALERT, cycle->log, 0, "moesaic_pool %V keeps its engines: %s", &pools[i]->name,
                  error);
  }
  return NGX_OK;
}

static ngx_int_t moesaic_init_process(ngx_cycle_t* cycle) {
  moesaic_main_conf_t* conf = moesaic_main_conf(cycle);
  moesaic_loop_t** pools;
  ngx_uint_t i;

  if (conf == NULL || (ngx_process != NGX_PROCESS_WORKER && ngx_process != NGX_PROCESS_SINGLE)) return NGX_OK;
  pools = conf->pools.elts;
  for (i = 0; i < conf->pools.nelts; i++) {
    moesaic_loop_start(pools[i], cycle);
  }
  return NGX_OK;
}

static void moesaic_exit_process(ngx_cycle_t* cycle) {
  moesaic_main_conf_t* conf = moesaic_main_conf(cycle);
  moesaic_loop_t** pools;
  ngx_uint_t i;

  if (conf == NULL) return;
  pools = conf->pools.elts;
  for (i = 0; i < conf->pools.nelts; i++) moesaic_loop_stop(pools[i]);
}

static ngx_http_module_t moesaic_context = {
    moesaic_preconfiguration, moesaic_postconfiguration, moesaic_create_main_conf, NULL, NULL, NULL,
    moesaic_create_loc_conf,  moesaic_merge_loc_conf};

ngx_module_t ngx_http_moesaic_module = {NGX_MODULE_V1,
                                        &moesaic_context,
                                        moesaic_commands,
                                        NGX_HTTP_MODULE,
                                        NULL,
                                        moesaic_init_module,
                                        moesaic_init_process,
                                        NULL,
                                        NULL,
                                        moesaic_exit_process,
                                        NULL,
                                        NGX_MODULE_V1_PADDING};
