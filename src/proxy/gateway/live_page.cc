#include <string>

#include "proxy/gateway/status_pages.h"

namespace moesaic::proxy {
namespace {

// Prefill is blue and decode is teal, both 3:1 against the track; state is written in words besides its
// color. Numbers have tabular figures.
constexpr const char* kPage = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>Moesaic proxy</title><link rel="icon" href="data:,">
<style>
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#1c1d1f;--soft:#63666d;--line:#e3e3df;--bar:#2f6fde;--bar2:#0e7f71;--good:#14793e;--bad:#b3261e;--warn:#8a5a00}
@media(prefers-color-scheme:dark){:root{--bg:#141517;--card:#1d1f22;--ink:#ececea;--soft:#a3a6ad;--line:#303338;--bar:#6aa0ff;--bar2:#35b8a4;--good:#5bd08a;--bad:#ff8a80;--warn:#f0b95a}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}
header{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline;margin-bottom:16px}
h1{font-size:20px;margin:0}h2{font-size:15px;margin:24px 0 8px}
.soft{color:var(--soft)}#live{margin-left:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:22px;font-weight:600;line-height:1.2}.tile span{color:var(--soft);font-size:13px}
.stage{display:grid;grid-template-columns:9.5em 1fr 4.5em 6em;gap:10px;align-items:center;padding:4px 0}
.stage>:nth-child(n+3){text-align:right}.track{height:8px;border-radius:4px;background:var(--line);overflow:hidden}
.fill{height:100%;background:var(--bar);border-radius:4px;transition:width .3s}
.engine{padding:12px 0;border-top:1px solid var(--line)}.engine:first-child{border-top:0;padding-top:0}.engine:last-child{padding-bottom:0}
.head{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;margin-bottom:6px}.head b{overflow-wrap:anywhere;font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.split{display:flex;height:8px;border-radius:4px;background:var(--line);overflow:hidden}.split i{display:block;height:100%;background:var(--bar)}.split i+i{background:var(--bar2)}
.facts{display:flex;flex-wrap:wrap;gap:2px 18px;font-size:13px;color:var(--soft);margin-top:6px}
.key{display:inline-block;width:9px;height:9px;border-radius:2px;background:var(--bar);margin-right:5px}.key.two{background:var(--bar2);margin-left:12px}
.row{display:flex;flex-wrap:wrap;gap:0 16px;justify-content:space-between;align-items:baseline}.row .soft{font-size:13px;font-weight:400}
@media(max-width:520px){.stage{grid-template-columns:1fr 3em 4.5em;gap:2px 10px}.stage .track{grid-column:1/-1;grid-row:2}.tiles{grid-template-columns:1fr 1fr}#live{margin-left:0}}
</style></head><body><main>
<header><h1 id="name">Moesaic proxy</h1><span class="soft" id="sub"></span><span class="soft" id="live" role="status">connecting</span></header>
<section class="tiles" id="tiles" aria-label="Totals"></section>
<h2 class="row">Stages<span class="soft">requests now, mean time</span></h2><section class="card" id="stages" aria-label="Requests in each stage"></section>
<h2 class="row">Engines<span class="soft"><span class="key"></span>prefill tokens <span class="key two"></span>decode tokens</span></h2><section class="card" id="engines" aria-label="Load of each engine"></section>
</main><script>
"use strict";
const $=id=>document.getElementById(id),num=n=>n.toLocaleString("en"),short=n=>n<1e4?num(n):n<1e6?(n/1e3).toFixed(1)+"k":n<1e9?(n/1e6).toFixed(1)+"M":(n/1e9).toFixed(1)+"G";
const el=(tag,cls,text)=>{const e=document.createElement(tag);if(cls)e.className=cls;if(text!==undefined)e.textContent=text;return e};
const words=s=>s.replaceAll("_"," ");
const time=s=>s<.00095?(s*1e6).toFixed(s<.0000095?1:0)+" µs":s<.0095?(s*1e3).toFixed(2)+" ms":s<1?(s*1e3).toFixed(0)+" ms":s.toFixed(2)+" s";
let last=null;
function tile(value,label,cls){const t=el("div","tile");t.append(el("b",cls,value),el("span","",label));return t}
function show(s){
  $("name").textContent="Pool "+s.pool;$("sub").textContent=`${s.policy} · ${s.transfer} · master ${s.master||"none"}`;
  document.title="Moesaic proxy: "+s.pool;
  const live=s.stages.reduce((a,x)=>a+x.now,0),done=s.outcomes.completed,now=performance.now();
  const rate=last?Math.max(0,(done-last.done)/((now-last.at)/1e3)):0;last={done,at:now};
  const bad=s.outcomes.failed+s.outcomes.lost;
  $("tiles").replaceChildren(tile(num(live),"requests in the proxy"),tile(rate.toFixed(1)+"/s","completed"),
    tile(s.tokens.prompt?(100*s.tokens.cached/s.tokens.prompt).toFixed(1)+"%":"–","prompt tokens cached"),
    tile(s.ttft.count?time(s.ttft.seconds/s.ttft.count):"–","mean time to first token"),
    tile(num(s.outcomes.rejected),"rejected",s.outcomes.rejected?"warn":""),tile(num(bad),"failed or lost",bad?"bad":""));
  const most=Math.max(1,...s.stages.map(x=>x.now));
  $("stages").replaceChildren(...s.stages.filter(x=>x.name!=="done").map(x=>{
    const row=el("div","stage"),track=el("div","track"),fill=el("div","fill");fill.style.width=100*x.now/most+"%";track.append(fill);
    row.append(el("span","",words(x.name)),track,el("b","",num(x.now)),el("span","soft",x.count?time(x.seconds/x.count):"–"));return row}));
  const load=Math.max(1,...s.engines.map(e=>e.prefill_tokens+e.decode_tokens));
  $("engines").replaceChildren(...s.engines.map(e=>{
    const box=el("div","engine"),head=el("div","head"),bar=el("div","split"),a=el("i"),b=el("i"),facts=el("div","facts");
    a.style.width=100*e.prefill_tokens/load+"%";b.style.width=100*e.decode_tokens/load+"%";bar.append(a,b);
    head.append(el("b","",e.url+(e.rank?` rank ${e.rank}`:"")),el("span",e.state==="enabled"?"good":"bad",e.state),
      el("span","soft",e.role),el("span",e.index==="exact"?"good":e.index==="none"?"soft":"warn",e.index==="none"?"no KV events":"index "+e.index));
    const hit=e.prompt_tokens?(100*e.cached_tokens/e.prompt_tokens).toFixed(1)+"% cached":"no prompts yet";
    for(const t of [`prefill ${num(e.prefill_requests)} (${short(e.prefill_tokens)} tokens)`,`decode ${num(e.decode_requests)} (${short(e.decode_tokens)} tokens)`,hit,`completed ${short(e.completed)}`])facts.append(el("span","",t));
    facts.append(el("span",e.failed?"bad":"",`failed ${short(e.failed)}`));
    box.append(head,bar,facts);return box}));
  if(!s.engines.length)$("engines").replaceChildren(el("span","bad","There is no engine: requests wait for one, at most queue_timeout."));
}
async function turn(){
  try{const r=await fetch("?state",{cache:"no-store"});if(!r.ok)throw new Error(r.status);show(await r.json());$("live").textContent="live";$("live").className="good"}
  catch(e){$("live").textContent="no answer";$("live").className="bad"}
  setTimeout(turn,document.hidden?5000:1000);
}
turn();
</script></body></html>
)html";

}  // namespace

std::string LivePage(Gateway&) { return kPage; }

}  // namespace moesaic::proxy
