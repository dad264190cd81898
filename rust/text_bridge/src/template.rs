//! Bridge interface of chat templates.

use crate::guard::{fail, guarded, BridgeError, Result, CHAT_TEMPLATE};
use jinja::{tag, Options, Template as Compiled};
use serde_json::Value;

pub struct Template(Compiled);

pub fn template_from_source(source: &[u8]) -> Result<Box<Template>> {
    guarded(CHAT_TEMPLATE, || {
        let text =
            std::str::from_utf8(source).map_err(|_| BridgeError("the template is not UTF-8".into()))?;
        Ok(Box::new(Template(Compiled::compile(text).map_err(fail)?)))
    })
}

impl Template {
    /// `context`: a JSON object with the template's variables. `now`: seconds since 1970, negative for the
    /// current time. `aliases`: each message's reasoning is provided under all its names, like `transformers`
    /// does.
    pub fn render(&self, context: &[u8], may_mutate: bool, now: i64, aliases: bool) -> Result<Vec<u8>> {
        guarded(CHAT_TEMPLATE, || {
            let text =
                std::str::from_utf8(context).map_err(|_| BridgeError("the context is not UTF-8".into()))?;
            let (text, tag) = tag(text);
            let mut context: Value =
                serde_json::from_str(&text).map_err(|e| BridgeError(format!("context: {e}")))?;
            if aliases {
                context.get_mut("messages").map(alias_reasoning);
            }
            let options = Options { may_mutate, now: (now >= 0).then_some(now) };
            Ok(self.0.render(context, tag.as_ref(), options).map_err(fail)?.into_bytes())
        })
    }
}

/// Templates read a message's reasoning under one of three names. The first one that a message has is copied
/// to `thinking`, if that is missing, and to `reasoning_content`.
fn alias_reasoning(messages: &mut Value) {
    for message in messages.as_array_mut().into_iter().flatten() {
        let Some(members) = message.as_object_mut() else {
            continue;
        };
        let names = ["reasoning_content", "thinking", "reasoning"];
        let Some(reasoning) =
            names.iter().find_map(|name| members.get(*name).filter(|v| !v.is_null())).cloned()
        else {
            continue;
        };
        let mut aliased = serde_json::Map::new();
        aliased.insert("thinking".into(), reasoning.clone());
        aliased.extend(std::mem::take(members));
        aliased.insert("reasoning_content".into(), reasoning);
        *members = aliased;
    }
}
