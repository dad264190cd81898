//! Jinja2's expression grammar. Each method parses one level of precedence, loosest first.

use super::ast::{Args, Binary, Compare, Expr, Literal, Name};
use super::error::{syntax, Result};
use super::lexer::Token;
use super::parser::Parser;

fn boxed(expr: Expr) -> Box<Expr> {
    Box::new(expr)
}

impl Parser {
    pub fn expression(&mut self) -> Result<Expr> {
        self.nested(|p| {
            let mut value = p.or_expression()?;
            while p.skip_name("if") {
                let test = p.or_expression()?;
                let otherwise = if p.skip_name("else") { Some(boxed(p.expression()?)) } else { None };
                value = Expr::Conditional { test: boxed(test), then: boxed(value), otherwise };
            }
            Ok(value)
        })
    }

    /// Parses an expression, or several separated by commas. `conditional`: allows `a if b else c`;
    /// `parenthesised`: `()` is an empty tuple; `end_names` end it.
    pub fn tuple(&mut self, conditional: bool, parenthesised: bool, end_names: &[&str]) -> Result<Expr> {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            let ended = matches!(self.peek(), Token::VariableEnd | Token::BlockEnd)
                || self.at_op(")")
                || end_names.iter().any(|name| self.at_name(name));
            if ended {
                break;
            }
            items.push(if conditional { self.expression()? } else { self.nested(Self::or_expression)? });
            if !self.skip_op(",") {
                break;
            }
            is_tuple = true;
        }
        if !is_tuple {
            if let Some(single) = items.pop() {
                return Ok(single);
            }
            if !parenthesised {
                return self.unexpected("an expression");
            }
        }
        Ok(Expr::Tuple(items))
    }

    fn or_expression(&mut self) -> Result<Expr> {
        let mut left = self.and_expression()?;
        while self.skip_name("or") {
            left = Expr::Or(boxed(left), boxed(self.and_expression()?));
        }
        Ok(left)
    }

    fn and_expression(&mut self) -> Result<Expr> {
        let mut left = self.not_expression()?;
        while self.skip_name("and") {
            left = Expr::And(boxed(left), boxed(self.not_expression()?));
        }
        Ok(left)
    }

    fn not_expression(&mut self) -> Result<Expr> {
        if self.skip_name("not") {
            return self.nested(|p| Ok(Expr::Not(boxed(p.not_expression()?))));
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Result<Expr> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let op = match self.peek() {
                Token::Op("==") => Compare::Eq,
                Token::Op("!=") => Compare::Ne,
                Token::Op("<") => Compare::Lt,
                Token::Op("<=") => Compare::Le,
                Token::Op(">") => Compare::Gt,
                Token::Op(">=") => Compare::Ge,
                Token::Name(name) if &**name == "in" => Compare::In,
                Token::Name(name)
                    if &**name == "not" && matches!(self.peek_next(), Token::Name(n) if &**n == "in") =>
                {
                    self.next();
                    Compare::NotIn
                }
                _ => break,
            };
            self.next();
            rest.push((op, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Compare(boxed(first), rest) })
    }

    fn sum(&mut self) -> Result<Expr> {
        let mut left = self.concat()?;
        loop {
            let op = match self.peek() {
                Token::Op("+") => Binary::Add,
                Token::Op("-") => Binary::Sub,
                _ => return Ok(left),
            };
            self.next();
            left = Expr::Binary(op, boxed(left), boxed(self.concat()?));
        }
    }

    fn concat(&mut self) -> Result<Expr> {
        let first = self.product()?;
        if !self.at_op("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_op("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> Result<Expr> {
        let mut left = self.power()?;
        loop {
            let op = match self.peek() {
                Token::Op("*") => Binary::Mul,
                Token::Op("/") => Binary::Div,
                Token::Op("//") => Binary::FloorDiv,
                Token::Op("%") => Binary::Mod,
                _ => return Ok(left),
            };
            self.next();
            left = Expr::Binary(op, boxed(left), boxed(self.power()?));
        }
    }

    /// Left-associative, unlike Python's.
    fn power(&mut self) -> Result<Expr> {
        let mut left = self.unary(true)?;
        while self.skip_op("**") {
            left = Expr::Binary(Binary::Pow, boxed(left), boxed(self.unary(true)?));
        }
        Ok(left)
    }

    fn unary(&mut self, filters: bool) -> Result<Expr> {
        let mut value = if self.skip_op("-") {
            self.nested(|p| Ok(Expr::Negate(boxed(p.unary(false)?))))?
        } else if self.skip_op("+") {
            self.nested(|p| Ok(Expr::Plus(boxed(p.unary(false)?))))?
        } else {
            self.primary()?
        };
        value = self.postfix(value)?;
        if filters {
            value = self.filters_and_tests(value)?;
        }
        Ok(value)
    }

    fn primary(&mut self) -> Result<Expr> {
        let line = self.line();
        match self.next() {
            Token::Name(name) => Ok(match &*name {
                "true" | "True" => Expr::Literal(Literal::Bool(true)),
                "false" | "False" => Expr::Literal(Literal::Bool(false)),
                "none" | "None" => Expr::Literal(Literal::None),
                _ if name.starts_with(|c: char| c.is_numeric()) => {
                    return syntax(line, format!("Invalid character in identifier '{name}'"));
                }
                _ => {
                    self.saw_name(&name);
                    Expr::Name(name)
                }
            }),
            Token::Str(text) => {
                let Token::Str(_) = self.peek() else {
                    return Ok(Expr::Literal(Literal::Str(text)));
                };
                let mut joined = text.to_string();
                while let Token::Str(more) = self.peek().clone() {
                    joined.push_str(&more);
                    self.next();
                }
                Ok(Expr::Literal(Literal::Str(joined.into())))
            }
            Token::Int(value) => Ok(Expr::Literal(Literal::Int(value))),
            Token::Float(value) => Ok(Expr::Literal(Literal::Float(value))),
            Token::Op("(") => {
                let value = self.tuple(true, true, &[])?;
                self.expect_op(")")?;
                Ok(value)
            }
            Token::Op("[") => {
                let mut items = Vec::new();
                while !self.at_op("]") {
                    if !items.is_empty() {
                        self.expect_op(",")?;
                        if self.at_op("]") {
                            break;
                        }
                    }
                    items.push(self.expression()?);
                }
                self.expect_op("]")?;
                Ok(Expr::List(items))
            }
            Token::Op("{") => {
                let mut items = Vec::new();
                while !self.at_op("}") {
                    if !items.is_empty() {
                        self.expect_op(",")?;
                        if self.at_op("}") {
                            break;
                        }
                    }
                    let key = self.expression()?;
                    self.expect_op(":")?;
                    items.push((key, self.expression()?));
                }
                self.expect_op("}")?;
                Ok(Expr::Dict(items))
            }
            other => {
                let shown = match other {
                    Token::Op(op) => op.to_string(),
                    Token::VariableEnd => "end of print statement".into(),
                    Token::BlockEnd => "end of statement block".into(),
                    _ => "end of template".into(),
                };
                syntax(line, format!("unexpected '{shown}'"))
            }
        }
    }

    fn postfix(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            if self.skip_op(".") {
                value = match self.next() {
                    Token::Name(name) => Expr::Attribute(boxed(value), name),
                    Token::Int(index) => Expr::Item(boxed(value), boxed(Expr::Literal(Literal::Int(index)))),
                    _ => return syntax(self.line(), "expected name or number"),
                };
            } else if self.skip_op("[") {
                value = self.subscript(value)?;
            } else if self.at_op("(") {
                value = Expr::Call(boxed(value), Box::new(self.call_arguments()?));
            } else {
                return Ok(value);
            }
        }
    }

    fn subscript(&mut self, of: Expr) -> Result<Expr> {
        let mut parts: [Option<Box<Expr>>; 3] = [None, None, None];
        let mut colons = 0;
        while !self.at_op("]") {
            if self.skip_op(":") {
                colons += 1;
                if colons > 2 {
                    return self.unexpected("token ']'");
                }
            } else if parts[colons].is_none() {
                let mut index = self.expression()?;
                if colons == 0 && self.at_op(",") {
                    let mut items = vec![index];
                    while self.skip_op(",") {
                        items.push(self.expression()?);
                    }
                    index = Expr::Tuple(items);
                }
                parts[colons] = Some(boxed(index));
            } else {
                return self.unexpected("token ']'");
            }
        }
        self.expect_op("]")?;
        let [start, stop, step] = parts;
        match (colons, start) {
            (0, Some(index)) => Ok(Expr::Item(boxed(of), index)),
            (0, None) => Ok(Expr::Item(boxed(of), boxed(Expr::Tuple(Vec::new())))),
            (_, start) => Ok(Expr::Slice { of: boxed(of), start, stop, step }),
        }
    }

    pub fn call_arguments(&mut self) -> Result<Args> {
        let mut args = Args::default();
        self.expect_op("(")?;
        let mut first = true;
        while !self.at_op(")") {
            if !first {
                self.expect_op(",")?;
                if self.at_op(")") {
                    break;
                }
            }
            first = false;
            if self.skip_op("**") {
                if args.star_star.is_some() {
                    return syntax(self.line(), "invalid syntax for function call expression");
                }
                args.star_star = Some(boxed(self.expression()?));
            } else if self.skip_op("*") {
                if args.star.is_some() || args.star_star.is_some() {
                    return syntax(self.line(), "invalid syntax for function call expression");
                }
                args.star = Some(boxed(self.expression()?));
            } else if matches!(self.peek(), Token::Name(_)) && *self.peek_next() == Token::Op("=") {
                let name = self.identifier()?;
                self.next();
                args.keyword.push((name, self.expression()?));
            } else {
                if args.star.is_some() || args.star_star.is_some() || !args.keyword.is_empty() {
                    return syntax(self.line(), "invalid syntax for function call expression");
                }
                args.positional.push(self.expression()?);
            }
        }
        self.expect_op(")")?;
        Ok(args)
    }

    fn dotted_name(&mut self) -> Result<Name> {
        let mut name = self.identifier()?.to_string();
        while self.skip_op(".") {
            name.push('.');
            name.push_str(&self.identifier()?);
        }
        Ok(name.into())
    }

    fn filter_on(&mut self, of: Expr) -> Result<Expr> {
        let name = self.dotted_name()?;
        let args = if self.at_op("(") { self.call_arguments()? } else { Args::default() };
        Ok(Expr::Filter { name, of: boxed(of), args: Box::new(args) })
    }

    /// Parses the filters of a `{% filter %}` or block `{% set %}`, applied to the rendered body.
    pub fn filter_chain(&mut self) -> Result<Expr> {
        let mut value = self.filter_on(Expr::Body)?;
        while self.skip_op("|") {
            value = self.filter_on(value)?;
        }
        Ok(value)
    }

    fn filters_and_tests(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            if self.skip_op("|") {
                value = self.filter_on(value)?;
            } else if self.skip_name("is") {
                value = self.test_on(value)?;
            } else if self.at_op("(") {
                value = Expr::Call(boxed(value), Box::new(self.call_arguments()?));
            } else {
                return Ok(value);
            }
        }
    }

    fn test_on(&mut self, of: Expr) -> Result<Expr> {
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let mut args = Args::default();
        if self.at_op("(") {
            args = self.call_arguments()?;
        } else {
            let starts_argument = match self.peek() {
                Token::Name(name) => !matches!(&**name, "else" | "or" | "and"),
                Token::Str(_) | Token::Int(_) | Token::Float(_) => true,
                Token::Op(op) => matches!(*op, "[" | "{"),
                _ => false,
            };
            if starts_argument {
                if self.at_name("is") {
                    return syntax(self.line(), "You cannot chain multiple tests with is");
                }
                let argument = self.primary()?;
                args.positional.push(self.postfix(argument)?);
            }
        }
        let test = Expr::Test { name, of: boxed(of), args: Box::new(args) };
        Ok(if negated { Expr::Not(boxed(test)) } else { test })
    }
}
