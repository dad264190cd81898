//! Bridge interface of chat templates.

use crate::ffi::{TemplateHole, TemplateText};
use crate::guard::{fail, guarded, BridgeError, Result, CHAT_TEMPLATE};
use jinja::{Context, Options, Template as Compiled};

pub struct Template(Compiled);

pub fn template_from_source(source: &[u8]) -> Result<Box<Template>> {
    guarded(CHAT_TEMPLATE, || {
        let text =
            std::str::from_utf8(source).map_err(|_| BridgeError("the template is not UTF-8".into()))?;
        Ok(Box::new(Template(Compiled::compile(text).map_err(fail)?)))
    })
}

fn options(may_mutate: bool, now: i64) -> Options {
    Options { may_mutate, now: (now >= 0).then_some(now) }
}

impl Template {
    /// `variables`: a JSON object with the template's variables. `messages`: JSON value of one more; empty: there is
    /// none. `now`: seconds since 1970, negative for the current time. `aliases`: each message's reasoning is provided
    /// under all its names, like `transformers` does.
    pub fn render(
        &self,
        variables: &[u8],
        messages: &[u8],
        may_mutate: bool,
        now: i64,
        aliases: bool,
    ) -> Result<Vec<u8>> {
        guarded(CHAT_TEMPLATE, || {
            let context = Context { variables, messages, aliases };
            Ok(self.0.render(context, options(may_mutate, now)).map_err(fail)?.into_bytes())
        })
    }

    /// Renders without copying long strings of the messages.
    pub fn render_with_holes(
        &self,
        variables: &[u8],
        messages: &[u8],
        may_mutate: bool,
        now: i64,
    ) -> Result<TemplateText> {
        guarded(CHAT_TEMPLATE, || {
            let context = Context { variables, messages, aliases: true };
            let rendered = self.0.render_with_holes(context, options(may_mutate, now)).map_err(fail)?;
            let holes = rendered.holes.iter();
            Ok(TemplateText {
                text: rendered.text.into_bytes(),
                holes: holes
                    .map(|hole| TemplateHole { at: hole.at, begin: hole.begin, end: hole.end })
                    .collect(),
            })
        })
    }
}
