//! Jinja2's grammar: statements here, expressions in expression.rs.

use super::ast::{Expr, For, Macro, Name, Stmt, Target};
use super::error::{syntax, Result};
use super::lexer::{tokenize, Lexeme, Token};
use std::collections::HashSet;
use std::sync::Arc;

/// Deeper than any real template, and shallow enough for every thread's stack.
pub const MAX_NESTING: usize = 100;

pub struct Parser {
    lexemes: Vec<Lexeme>,
    at: usize,
    pub nesting: usize,
    loops: usize,
    /// Names read inside each macro being parsed.
    names_read: Vec<HashSet<Name>>,
}

pub fn parse(source: &str) -> Result<Vec<Stmt>> {
    let lexemes = tokenize(source)?;
    let mut parser = Parser { lexemes, at: 0, nesting: 0, loops: 0, names_read: Vec::new() };
    let (body, _) = parser.body(&[])?;
    Ok(body)
}

impl Parser {
    pub fn peek(&self) -> &Token {
        &self.lexemes[self.at].token
    }

    pub fn peek_next(&self) -> &Token {
        &self.lexemes[(self.at + 1).min(self.lexemes.len() - 1)].token
    }

    pub fn line(&self) -> usize {
        self.lexemes[self.at].line
    }

    pub fn next(&mut self) -> Token {
        let token = self.lexemes[self.at].token.clone();
        if self.at + 1 < self.lexemes.len() {
            self.at += 1;
        }
        token
    }

    pub fn at_op(&self, op: &str) -> bool {
        matches!(self.peek(), Token::Op(found) if *found == op)
    }

    pub fn at_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if &**found == name)
    }

    pub fn skip_op(&mut self, op: &str) -> bool {
        let found = self.at_op(op);
        if found {
            self.next();
        }
        found
    }

    pub fn skip_name(&mut self, name: &str) -> bool {
        let found = self.at_name(name);
        if found {
            self.next();
        }
        found
    }

    pub fn unexpected<T>(&self, expected: &str) -> Result<T> {
        let found = match self.peek() {
            Token::Name(name) => name.to_string(),
            Token::Op(op) => (*op).to_string(),
            Token::Str(_) => "string".into(),
            Token::Int(_) | Token::Float(_) => "number".into(),
            Token::Text(_) => "template data / text".into(),
            Token::VariableBegin | Token::BlockBegin => "begin of a tag".into(),
            Token::VariableEnd => "end of print statement".into(),
            Token::BlockEnd => "end of statement block".into(),
            Token::End => "end of template".into(),
        };
        syntax(self.line(), format!("expected {expected}, got '{found}'"))
    }

    pub fn expect_op(&mut self, op: &str) -> Result<()> {
        if self.skip_op(op) {
            return Ok(());
        }
        self.unexpected(&format!("token '{op}'"))
    }

    pub fn expect_name(&mut self, name: &str) -> Result<()> {
        if self.skip_name(name) {
            return Ok(());
        }
        self.unexpected(&format!("'{name}'"))
    }

    pub fn identifier(&mut self) -> Result<Name> {
        match self.peek().clone() {
            Token::Name(name) if !name.starts_with(|c: char| c.is_numeric()) => {
                self.next();
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    pub fn saw_name(&mut self, name: &Name) {
        for names in &mut self.names_read {
            names.insert(name.clone());
        }
    }

    /// Runs `parse` one level deeper.
    pub fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return syntax(self.line(), format!("nested more than {MAX_NESTING} levels deep"));
        }
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Parses statements up to one of the tags in `ends`, whose name is consumed but not its arguments; or up
    /// to the template's end if `ends` is empty.
    fn body(&mut self, ends: &[&str]) -> Result<(Vec<Stmt>, String)> {
        self.nested(|p| {
            let mut body = Vec::new();
            loop {
                match p.next() {
                    Token::End if ends.is_empty() => return Ok((body, String::new())),
                    Token::End => {
                        let message =
                            format!("unexpected end of template, looking for {}", ends.join(" or "));
                        return syntax(p.line(), message);
                    }
                    Token::Text(text) => body.push(Stmt::Text(text)),
                    Token::VariableBegin => {
                        let value = p.tuple(true, false, &[])?;
                        if p.next() != Token::VariableEnd {
                            p.at -= 1;
                            return p.unexpected("token 'end of print statement'");
                        }
                        body.push(Stmt::Print(value));
                    }
                    Token::BlockBegin => {
                        let Token::Name(tag) = p.next() else {
                            return syntax(p.line(), "tag name expected");
                        };
                        if ends.contains(&&*tag) {
                            return Ok((body, tag.to_string()));
                        }
                        body.push(p.statement(&tag)?);
                    }
                    _ => return p.unexpected("text or a tag"),
                }
            }
        })
    }

    fn end_block(&mut self) -> Result<()> {
        if *self.peek() == Token::BlockEnd {
            self.next();
            return Ok(());
        }
        self.unexpected("token 'end of statement block'")
    }

    /// A body whose closing tag has no arguments.
    fn closed_body(&mut self, end: &str) -> Result<Vec<Stmt>> {
        self.end_block()?;
        let (body, _) = self.body(&[end])?;
        self.end_block()?;
        Ok(body)
    }

    fn statement(&mut self, tag: &str) -> Result<Stmt> {
        match tag {
            "if" => self.if_statement(),
            "for" => self.for_statement(),
            "set" => self.set_statement(),
            "with" => self.with_statement(),
            "macro" => self.macro_statement(),
            "call" => self.call_statement(),
            "filter" => {
                let filters = self.filter_chain()?;
                Ok(Stmt::FilterBlock { filters, body: self.closed_body("endfilter")? })
            }
            "generation" => Ok(Stmt::Generation(self.closed_body("endgeneration")?)),
            "block" => {
                let name = self.identifier()?;
                while self.skip_name("scoped") || self.skip_name("required") {}
                self.end_block()?;
                let (body, _) = self.body(&["endblock"])?;
                self.skip_name(&name);
                self.end_block()?;
                Ok(Stmt::Block(body))
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return syntax(self.line(), format!("'{tag}' outside loop"));
                }
                self.end_block()?;
                Ok(if tag == "break" { Stmt::Break } else { Stmt::Continue })
            }
            "include" | "import" | "from" | "extends" => {
                syntax(self.line(), format!("'{tag}' needs other templates, which a chat template has not"))
            }
            _ => syntax(self.line(), format!("Encountered unknown tag '{tag}'.")),
        }
    }

    fn if_statement(&mut self) -> Result<Stmt> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, false, &[])?;
            self.end_block()?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((test, body));
            match end.as_str() {
                "elif" => continue,
                "else" => {
                    let otherwise = self.closed_body("endif")?;
                    return Ok(Stmt::If { branches, otherwise });
                }
                _ => {
                    self.end_block()?;
                    return Ok(Stmt::If { branches, otherwise: Vec::new() });
                }
            }
        }
    }

    fn for_statement(&mut self) -> Result<Stmt> {
        let target = self.target(false)?;
        self.expect_name("in")?;
        let iterable = self.tuple(false, false, &["recursive"])?;
        let condition = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_name("recursive");
        self.end_block()?;
        self.loops += 1;
        let parsed = self.body(&["endfor", "else"]);
        self.loops -= 1;
        let (body, end) = parsed?;
        let otherwise = if end == "else" {
            self.closed_body("endfor")?
        } else {
            self.end_block()?;
            Vec::new()
        };
        Ok(Stmt::For(Arc::new(For { target, iterable, condition, body, otherwise, recursive })))
    }

    fn set_statement(&mut self) -> Result<Stmt> {
        let target = self.target(true)?;
        if self.skip_op("=") {
            let value = self.tuple(true, false, &[])?;
            self.end_block()?;
            return Ok(Stmt::Set(target, value));
        }
        let filters = if self.at_op("|") {
            self.next();
            Some(self.filter_chain()?)
        } else {
            None
        };
        Ok(Stmt::SetBody { target, filters, body: self.closed_body("endset")? })
    }

    fn with_statement(&mut self) -> Result<Stmt> {
        let mut bindings = Vec::new();
        while *self.peek() != Token::BlockEnd {
            if !bindings.is_empty() {
                self.expect_op(",")?;
            }
            let target = self.target(false)?;
            self.expect_op("=")?;
            bindings.push((target, self.expression()?));
        }
        Ok(Stmt::With { bindings, body: self.closed_body("endwith")? })
    }

    fn parameters(&mut self) -> Result<Vec<(Name, Option<Expr>)>> {
        let mut parameters: Vec<(Name, Option<Expr>)> = Vec::new();
        self.expect_op("(")?;
        while !self.at_op(")") {
            if !parameters.is_empty() {
                self.expect_op(",")?;
                if self.at_op(")") {
                    break;
                }
            }
            let name = self.identifier()?;
            let default = if self.skip_op("=") {
                Some(self.expression()?)
            } else if parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return syntax(self.line(), "non-default argument follows default argument");
            } else {
                None
            };
            parameters.push((name, default));
        }
        self.expect_op(")")?;
        Ok(parameters)
    }

    /// Parses the body of a macro. It has its own scope, so `break` and `continue` cannot leave an outer loop
    /// from it.
    fn macro_body(
        &mut self,
        name: Name,
        parameters: Vec<(Name, Option<Expr>)>,
        end: &str,
    ) -> Result<Arc<Macro>> {
        self.names_read.push(HashSet::new());
        let loops = std::mem::take(&mut self.loops);
        let body = self.closed_body(end);
        self.loops = loops;
        let read = self.names_read.pop().unwrap_or_default();
        let takes =
            |special: &str| read.contains(special) && !parameters.iter().any(|(n, _)| &**n == special);
        let (takes_varargs, takes_kwargs, takes_caller) =
            (takes("varargs"), takes("kwargs"), takes("caller"));
        Ok(Arc::new(Macro { name, body: body?, takes_varargs, takes_kwargs, takes_caller, parameters }))
    }

    fn macro_statement(&mut self) -> Result<Stmt> {
        let name = self.identifier()?;
        let parameters = self.parameters()?;
        Ok(Stmt::Macro(self.macro_body(name, parameters, "endmacro")?))
    }

    fn call_statement(&mut self) -> Result<Stmt> {
        let parameters = if self.at_op("(") { self.parameters()? } else { Vec::new() };
        let call = self.expression()?;
        if !matches!(call, Expr::Call(..)) {
            return syntax(self.line(), "expected call");
        }
        let caller = self.macro_body("caller".into(), parameters, "endcall")?;
        Ok(Stmt::CallBlock { caller, call })
    }

    /// Parses the target of an assignment: a name, several names, or (`namespaces`) `ns.attribute`.
    fn target(&mut self, namespaces: bool) -> Result<Target> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            if self.skip_op("(") {
                targets.push(self.nested(|p| p.target(namespaces))?);
                self.expect_op(")")?;
            } else {
                let name = self.identifier()?;
                if matches!(&*name, "true" | "false" | "none" | "True" | "False" | "None") {
                    return syntax(self.line(), format!("can't assign to '{name}'"));
                }
                if namespaces && self.skip_op(".") {
                    self.saw_name(&name);
                    targets.push(Target::Attribute { namespace: name, attribute: self.identifier()? });
                } else {
                    targets.push(Target::Name(name));
                }
            }
            if !self.skip_op(",") {
                break;
            }
            is_tuple = true;
            if self.at_name("in") || self.at_op("=") || self.at_op(")") {
                break;
            }
        }
        if is_tuple {
            return Ok(Target::Tuple(targets));
        }
        targets.pop().map_or_else(|| self.unexpected("a name"), Ok)
    }
}
