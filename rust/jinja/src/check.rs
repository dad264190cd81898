//! Rejects unknown filters and tests when a template is compiled, like Jinja2: not inside `if` and inline
//! `if`, where a template may use them conditionally.

use super::ast::{Args, Expr, Stmt};
use super::error::{raise, Result};
use super::{filters, tests};

/// `soft`: directly under a condition.
pub fn check(body: &[Stmt], soft: bool) -> Result<()> {
    body.iter().try_for_each(|statement| check_statement(statement, soft))
}

fn check_statement(statement: &Stmt, soft: bool) -> Result<()> {
    match statement {
        Stmt::Text(_) | Stmt::Break | Stmt::Continue => Ok(()),
        Stmt::Print(expr) | Stmt::Set(_, expr) => check_expr(expr, soft),
        Stmt::If { branches, otherwise } => {
            for (test, body) in branches {
                check_expr(test, true)?;
                check(body, true)?;
            }
            check(otherwise, true)
        }
        Stmt::For(definition) => {
            check_expr(&definition.iterable, soft)?;
            if let Some(condition) = &definition.condition {
                check_expr(condition, false)?;
            }
            check(&definition.body, false)?;
            check(&definition.otherwise, false)
        }
        Stmt::SetBody { filters, body, .. } => {
            if let Some(filters) = filters {
                check_expr(filters, false)?;
            }
            check(body, false)
        }
        Stmt::With { bindings, body } => {
            bindings.iter().try_for_each(|(_, expr)| check_expr(expr, soft))?;
            check(body, false)
        }
        Stmt::Macro(definition) => {
            definition
                .parameters
                .iter()
                .filter_map(|(_, d)| d.as_ref())
                .try_for_each(|d| check_expr(d, false))?;
            check(&definition.body, false)
        }
        Stmt::CallBlock { caller, call } => {
            check_expr(call, soft)?;
            check(&caller.body, false)
        }
        Stmt::FilterBlock { filters, body } => {
            check_expr(filters, false)?;
            check(body, false)
        }
        Stmt::Block(body) | Stmt::Generation(body) => check(body, false),
    }
}

fn check_args(args: &Args, soft: bool) -> Result<()> {
    args.positional.iter().try_for_each(|e| check_expr(e, soft))?;
    args.keyword.iter().try_for_each(|(_, e)| check_expr(e, soft))?;
    args.star.iter().chain(&args.star_star).try_for_each(|e| check_expr(e, soft))
}

fn check_expr(expr: &Expr, soft: bool) -> Result<()> {
    let walk = |e: &Expr| check_expr(e, soft);
    match expr {
        Expr::Literal(_) | Expr::Name(_) | Expr::Body => Ok(()),
        Expr::List(items) | Expr::Tuple(items) | Expr::Concat(items) => items.iter().try_for_each(walk),
        Expr::Dict(entries) => entries.iter().try_for_each(|(k, v)| walk(k).and_then(|()| walk(v))),
        Expr::Negate(of) | Expr::Plus(of) | Expr::Not(of) | Expr::Attribute(of, _) => walk(of),
        Expr::And(a, b) | Expr::Or(a, b) | Expr::Binary(_, a, b) | Expr::Item(a, b) => {
            walk(a).and_then(|()| walk(b))
        }
        Expr::Compare(first, rest) => walk(first).and_then(|()| rest.iter().try_for_each(|(_, e)| walk(e))),
        Expr::Conditional { test, then, otherwise } => {
            check_expr(test, true)?;
            check_expr(then, true)?;
            otherwise.iter().try_for_each(|e| check_expr(e, true))
        }
        Expr::Slice { of, start, stop, step } => {
            walk(of)?;
            [start, stop, step].into_iter().flatten().try_for_each(|e| walk(e))
        }
        Expr::Call(callee, args) => walk(callee).and_then(|()| check_args(args, soft)),
        Expr::Filter { name, of, args } => {
            if !soft && !filters::NAMES.contains(&&**name) {
                return raise(format!("No filter named '{name}' found."));
            }
            walk(of).and_then(|()| check_args(args, soft))
        }
        Expr::Test { name, of, args } => {
            if !soft && !tests::NAMES.contains(&&**name) {
                return raise(format!("No test named '{name}' found."));
            }
            walk(of).and_then(|()| check_args(args, soft))
        }
    }
}
