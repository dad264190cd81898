//! Additions of a tokenizer_config.json to a tokenizer: more tokens, and BOS and EOS around a text.

use crate::ffi::AddedToken;
use crate::guard::{fail, BridgeError, Result};
use tokenizers::{PostProcessorWrapper, Tokenizer};

/// Adds missing tokens; each must get the id that it names.
pub fn add_tokens(tokenizer: &mut Tokenizer, added: &[AddedToken]) -> Result<()> {
    let mut missing: Vec<&AddedToken> =
        added.iter().filter(|token| tokenizer.token_to_id(&token.content).is_none()).collect();
    missing.sort_by_key(|token| token.id);
    for token in missing {
        let entry = tokenizers::AddedToken::from(token.content.clone(), token.special)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .single_word(token.single_word)
            .normalized(token.normalized);
        if token.special {
            tokenizer.add_special_tokens(&[entry]);
        } else {
            tokenizer.add_tokens(&[entry]);
        }
        let got = tokenizer.token_to_id(&token.content);
        if got != u32::try_from(token.id).ok() {
            return Err(BridgeError(format!(
                "tokenizer_config.json: \"added_tokens_decoder\" gives {:?} the id {}, but the vocabulary {:?}",
                token.content, token.id, got
            )));
        }
    }
    Ok(())
}

/// Puts `bos` before and `eos` after a text; an empty string adds nothing.
pub fn wrap(tokenizer: &mut Tokenizer, bos: &str, eos: &str) -> Result<()> {
    if bos.is_empty() && eos.is_empty() {
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        return Ok(());
    }
    let mut single = vec![serde_json::json!({"Sequence": {"id": "A", "type_id": 0}})];
    let mut special = serde_json::Map::new();
    for (token, at) in [(eos, 1), (bos, 0)] {
        if token.is_empty() {
            continue;
        }
        let Some(id) = tokenizer.token_to_id(token) else {
            return Err(BridgeError(format!("special token {token:?} is not in the vocabulary")));
        };
        single.insert(at.min(single.len()), serde_json::json!({"SpecialToken": {"id": token, "type_id": 0}}));
        special.insert(token.to_string(), serde_json::json!({"id": token, "ids": [id], "tokens": [token]}));
    }
    let pair =
        serde_json::json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]);
    let template = serde_json::json!({
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special
    });
    let processor: PostProcessorWrapper = serde_json::from_value(template).map_err(fail)?;
    tokenizer.with_post_processor(Some(processor));
    Ok(())
}
