//! Rejects grammars whose lexer would take too long to build, before llguidance builds it without a limit.
//!
//! llguidance takes the first step of a lexer with unlimited fuel: it checks for each byte whether the rest
//! of every lexeme still matches some text. For `multipleOf` with a large number, or an intersection of
//! patterns, this check explores an automaton of millions of states. `rehearse` takes the same step under a
//! fuel limit.

use crate::guard::{BridgeError, Result};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use llguidance::derivre::raw::ExprSet;
use llguidance::derivre::ExprRef;
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::ParserFactory;

/// Maximum branches of one step through an intersection. Each costs about a microsecond, and no fuel limit
/// interrupts the step.
const MAX_BRANCHES: f64 = 20_000.0;

/// Maximum string patterns of a JSON schema that may apply to one value.
const MAX_INTERSECTED: usize = 8;

/// Maximum depth of a JSON schema, counted through references: the walk is recursive.
const MAX_DEPTH: usize = 256;

/// Most nodes of a JSON schema that the search for endless references visits. A schema that needs more is not refused.
const MAX_LOOP_STEPS: usize = 1_000_000;

/// Refuses long patterns in `schema`, `allOf` of many patterns, which llguidance intersects without a limit, and references
/// that no finite value matches.
pub fn check_schema(schema: &Value, regex_bytes: usize) -> Result<()> {
    let mut walk = SchemaWalk { root: schema, regex_bytes, depth: 0, refs: HashMap::new() };
    walk.patterns_of(schema)?;
    let mut targets: Vec<&str> = walk.refs.into_keys().collect();
    targets.sort_unstable();
    let mut search = LoopSearch { root: schema, depth: 0, steps: 0, finite: HashSet::new(), visited: HashSet::new() };
    search.check(&targets)
}

/// Checks each schema in a Lark grammar with `check_schema`.
pub fn check_lark(grammar: &str, regex_bytes: usize) -> Result<()> {
    for (at, mark) in grammar.match_indices("%json") {
        let rest = &grammar[at + mark.len()..];
        if let Some(Ok(schema)) = serde_json::Deserializer::from_str(rest).into_iter::<Value>().next() {
            check_schema(&schema, regex_bytes)?;
        }
    }
    Ok(())
}

struct SchemaWalk<'a> {
    root: &'a Value,
    regex_bytes: usize,
    /// Current depth of the walk.
    depth: usize,
    /// Results by pointer; 0 while a reference is being followed, so that cycles terminate.
    refs: HashMap<&'a str, usize>,
}

impl<'a> SchemaWalk<'a> {
    fn check_length(&self, keyword: &str, pattern: &str) -> Result<()> {
        if pattern.len() <= self.regex_bytes {
            return Ok(());
        }
        Err(BridgeError(format!(
            "a \"{keyword}\" of the JSON schema has {} bytes; at most {} are allowed",
            pattern.len(),
            self.regex_bytes
        )))
    }

    /// Returns an upper bound of the number of patterns that apply to one value described by `node`, or to a
    /// value inside it.
    fn patterns_of(&mut self, node: &'a Value) -> Result<usize> {
        if self.depth == MAX_DEPTH {
            return Err(BridgeError(format!("the JSON schema has more than {MAX_DEPTH} levels, $ref included")));
        }
        self.depth += 1;
        let count = self.patterns_at(node);
        self.depth -= 1;
        count
    }

    fn patterns_at(&mut self, node: &'a Value) -> Result<usize> {
        let mut most = 0; // over children that describe different values, or alternatives
        let mut sum = 0; // over children that describe the same value
        match node {
            Value::Array(items) => {
                for item in items {
                    most = most.max(self.patterns_of(item)?);
                }
            }
            Value::Object(members) => {
                for (key, value) in members {
                    match (key.as_str(), value) {
                        ("pattern", Value::String(pattern)) => {
                            self.check_length("pattern", pattern)?;
                            sum += 1;
                        }
                        ("format", Value::String(_)) => sum += 1,
                        ("allOf", Value::Array(parts)) => {
                            for part in parts {
                                sum += self.patterns_of(part)?;
                            }
                        }
                        ("$ref", Value::String(target)) => sum += self.patterns_behind(target)?,
                        ("patternProperties", Value::Object(schemas)) => {
                            for pattern in schemas.keys() {
                                self.check_length("patternProperties", pattern)?;
                            }
                            most = most.max(self.patterns_of(value)?);
                        }
                        ("properties" | "$defs" | "definitions" | "dependentSchemas", Value::Object(schemas)) => {
                            // Keys are arbitrary names, including "default" and "enum".
                            for schema in schemas.values() {
                                most = most.max(self.patterns_of(schema)?);
                            }
                        }
                        ("const" | "enum" | "default" | "examples", _) => {}
                        _ => most = most.max(self.patterns_of(value)?),
                    }
                }
            }
            _ => {}
        }
        sum += most;
        if sum > MAX_INTERSECTED {
            return Err(BridgeError(format!(
                "the JSON schema intersects {sum} patterns or formats by allOf and $ref; at most {MAX_INTERSECTED} are allowed"
            )));
        }
        Ok(sum)
    }

    fn patterns_behind(&mut self, target: &'a str) -> Result<usize> {
        if let Some(&known) = self.refs.get(target) {
            return Ok(known);
        }
        self.refs.insert(target, 0);
        let count = resolve(self.root, target).map_or(Ok(0), |node| self.patterns_of(node))?;
        self.refs.insert(target, count);
        Ok(count)
    }
}

/// Finds references that lead back to themselves on every path, as {"$ref":"#"} does. llguidance accepts such a schema, and
/// fails when the text reaches it: no token can continue.
struct LoopSearch<'a> {
    root: &'a Value,
    /// Open calls of `ends`.
    depth: usize,
    /// Nodes visited so far.
    steps: usize,
    /// References that a finite value matches.
    finite: HashSet<&'a str>,
    /// References visited in this pass.
    visited: HashSet<&'a str>,
}

impl<'a> LoopSearch<'a> {
    /// Marks references as finite until a pass finds no more, and refuses the first of `targets` that is not.
    fn check(&mut self, targets: &[&'a str]) -> Result<()> {
        loop {
            let known = self.finite.len();
            self.visited.clear();
            for &target in targets {
                self.target_ends(target);
            }
            if self.steps >= MAX_LOOP_STEPS {
                return Ok(());
            }
            if self.finite.len() == known {
                break;
            }
        }
        match targets.iter().find(|target| !self.finite.contains(*target)) {
            None => Ok(()),
            Some(target) => Err(BridgeError(format!(
                "the JSON schema matches no finite text: its \"$ref\" to \"{target}\" leads back to itself on every path"
            ))),
        }
    }

    fn target_ends(&mut self, target: &'a str) -> bool {
        if self.finite.contains(target) {
            return true;
        }
        if !self.visited.insert(target) {
            return false;
        }
        let ends = resolve(self.root, target).is_none_or(|node| self.ends(node));
        if ends {
            self.finite.insert(target);
        }
        ends
    }

    /// Returns true if a finite value matches `node`, as far as its references and their nesting decide that.
    fn ends(&mut self, node: &'a Value) -> bool {
        let Value::Object(members) = node else { return true };
        self.steps += 1;
        if self.depth == MAX_DEPTH || self.steps >= MAX_LOOP_STEPS {
            return true;
        }
        self.depth += 1;
        let ends = self.members_end(members);
        self.depth -= 1;
        ends
    }

    fn members_end(&mut self, members: &'a Map<String, Value>) -> bool {
        if let Some(Value::String(target)) = members.get("$ref") {
            if !self.target_ends(target) {
                return false;
            }
        }
        if let Some(Value::Array(parts)) = members.get("allOf") {
            if !parts.iter().all(|part| self.ends(part)) {
                return false;
            }
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(parts)) = members.get(keyword) {
                if !parts.is_empty() && !parts.iter().any(|part| self.ends(part)) {
                    return false;
                }
            }
        }
        self.required_end(members)
    }

    /// Returns true if values of the one type that `members` allow need no endless part.
    fn required_end(&mut self, members: &'a Map<String, Value>) -> bool {
        let only = match members.get("type") {
            Some(Value::String(name)) => name.as_str(),
            Some(Value::Array(names)) if names.len() == 1 => names[0].as_str().unwrap_or_default(),
            _ => return true,
        };
        match (only, members.get("properties"), members.get("required")) {
            ("object", Some(Value::Object(schemas)), Some(Value::Array(required))) => {
                required.iter().filter_map(|name| schemas.get(name.as_str()?)).all(|schema| self.ends(schema))
            }
            ("array", ..) => {
                let least = members.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
                let first = members.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
                let rest = members.get("items").filter(|_| least > first.len());
                first.iter().take(least).chain(rest).all(|schema| self.ends(schema))
            }
            _ => true,
        }
    }
}

/// The node of `root` that the reference `target` names by a JSON pointer.
fn resolve<'a>(root: &'a Value, target: &str) -> Option<&'a Value> {
    let pointer = target.strip_prefix('#').map(percent_decoded)?;
    root.pointer(&pointer)
}

/// Decodes each %XX of `text`, as references to parts of a document need it. Other sequences with % are kept.
fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = text.get(at + 1..at + 3).and_then(|code| u8::from_str_radix(code, 16).ok());
        match (bytes[at], code) {
            (b'%', Some(byte)) => {
                decoded.push(byte);
                at += 3;
            }
            (byte, _) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// Takes the lexer's first step under the fuel limit of `factory`.
pub fn rehearse(factory: &ParserFactory, spec: &LexerSpec) -> Result<()> {
    check_branches(spec.regex_builder.exprset())?;
    let mut spec = spec.clone();
    spec.add_extra_lexemes(&factory.extra_lexemes());
    let mut limits = factory.limits().clone();
    let mut lexer = spec.to_regex_vec(&mut limits).map_err(too_costly)?;
    lexer.set_fuel(factory.limits().initial_lexer_fuel);
    let start = lexer.initial_state(&spec.all_lexemes());
    for byte in 0..=255 {
        lexer.transition(start, byte);
        if let Some(error) = lexer.get_error() {
            return Err(too_costly(error));
        }
    }
    Ok(())
}

fn too_costly<E: std::fmt::Display>(reason: E) -> BridgeError {
    BridgeError(format!("the grammar costs too much to compile: {reason}"))
}

/// Estimates the branches of the first step through each expression: the product over the operands of an
/// intersection, the sum over those of an alternative.
fn check_branches(exprs: &ExprSet) -> Result<()> {
    let mut branches = vec![1.0f64; exprs.len()];
    for id in 1..exprs.len() {
        let expr = ExprRef::new(id as u32);
        let args = exprs.get_args(expr);
        // Expressions are created after their operands, so the operands' values are known.
        let of = |arg: &ExprRef| branches[arg.as_usize()];
        let tag = format!("{:?}", exprs.get_tag(expr));
        let count = match tag.as_str() {
            "And" => args.iter().map(of).product(),
            "Or" => args.iter().map(of).sum::<f64>().min(256.0),
            "Not" => args.iter().map(of).sum::<f64>() + 1.0,
            "Concat" => match args {
                [head, tail] if exprs.is_nullable(*head) => (of(head) + of(tail)).min(256.0),
                [head, ..] => of(head),
                [] => 1.0,
            },
            "RemainderIs" => 11.0,
            "Repeat" | "Lookahead" => args.iter().map(of).sum(),
            _ => 1.0,
        };
        if tag == "And" && count > MAX_BRANCHES {
            return Err(BridgeError(format!(
                "the grammar intersects {} patterns, which costs too much; use fewer or simpler ones",
                args.len()
            )));
        }
        branches[id] = count.max(1.0);
    }
    Ok(())
}
