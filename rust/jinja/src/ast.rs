//! The syntax tree of a template. It holds no run-time values, so threads can share it.

use std::sync::Arc;

pub type Name = Arc<str>;

#[derive(Debug, Clone)]
pub enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Name),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug, Default)]
pub struct Args {
    pub positional: Vec<Expr>,
    pub keyword: Vec<(Name, Expr)>,
    pub star: Option<Box<Expr>>,
    pub star_star: Option<Box<Expr>>,
}

#[derive(Debug)]
pub enum Expr {
    Literal(Literal),
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Negate(Box<Expr>),
    Plus(Box<Expr>),
    Not(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Compare, Expr)>),
    Conditional {
        test: Box<Expr>,
        then: Box<Expr>,
        otherwise: Option<Box<Expr>>,
    },
    Attribute(Box<Expr>, Name),
    Item(Box<Expr>, Box<Expr>),
    Slice {
        of: Box<Expr>,
        start: Option<Box<Expr>>,
        stop: Option<Box<Expr>>,
        step: Option<Box<Expr>>,
    },
    Call(Box<Expr>, Box<Args>),
    Filter {
        name: Name,
        of: Box<Expr>,
        args: Box<Args>,
    },
    Test {
        name: Name,
        of: Box<Expr>,
        args: Box<Args>,
    },
    /// The rendered body that a `{% filter %}` or block `{% set %}` passes to its filters.
    Body,
}

#[derive(Debug)]
pub enum Target {
    Name(Name),
    Tuple(Vec<Target>),
    Attribute { namespace: Name, attribute: Name },
}

#[derive(Debug)]
pub struct For {
    pub target: Target,
    pub iterable: Expr,
    pub condition: Option<Expr>,
    pub body: Vec<Stmt>,
    pub otherwise: Vec<Stmt>,
    pub recursive: bool,
}

/// A macro, or the body of a `{% call %}` (named "caller").
#[derive(Debug)]
pub struct Macro {
    pub name: Name,
    pub parameters: Vec<(Name, Option<Expr>)>,
    pub body: Vec<Stmt>,
    /// The body mentions `varargs`, `kwargs`, `caller`: only then are such arguments accepted.
    pub takes_varargs: bool,
    pub takes_kwargs: bool,
    pub takes_caller: bool,
}

#[derive(Debug)]
pub enum Stmt {
    Text(Name),
    Print(Expr),
    If { branches: Vec<(Expr, Vec<Stmt>)>, otherwise: Vec<Stmt> },
    For(Arc<For>),
    Set(Target, Expr),
    SetBody { target: Target, filters: Option<Expr>, body: Vec<Stmt> },
    With { bindings: Vec<(Target, Expr)>, body: Vec<Stmt> },
    Macro(Arc<Macro>),
    CallBlock { caller: Arc<Macro>, call: Expr },
    FilterBlock { filters: Expr, body: Vec<Stmt> },
    Block(Vec<Stmt>),
    Generation(Vec<Stmt>),
    Break,
    Continue,
}
