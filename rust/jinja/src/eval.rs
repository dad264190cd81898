//! Executes a parsed template: statements here, calls in invoke.rs.

use super::ast::{Args, Binary, Expr, For, Literal, Stmt, Target};
use super::call::CallArgs;
use super::error::{raise, Result};
use super::methods::{lookup, Lookup};
use super::ops;
use super::output::Output;
use super::quoted::Text;
use super::text::to_text;
use super::value::{Dict, Function, Items, LoopState, Scope, Str, Value};
use super::{filters, tests};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Permissions and clock of a rendering.
#[derive(Clone, Copy, Default)]
pub struct Options {
    /// Allows mutating methods of lists and dictionaries, which `transformers`' sandbox forbids.
    pub may_mutate: bool,
    /// Seconds since 1970 for `strftime_now`; None: the current time.
    pub now: Option<i64>,
}

/// Maximum nesting of expressions, statements and calls: bounds the stack.
const MAX_DEPTH: usize = 1500;
/// Maximum expressions, statements and loop iterations of one rendering: bounds the time.
const MAX_STEPS: u64 = 10_000_000;

pub enum Flow {
    Next,
    Break,
    Continue,
}

/// The strings of a sum that is printed: a long one is copied at most once, not once per `+`.
#[derive(Default)]
struct Sum {
    parts: Vec<Str>,
    /// Upper bound of the bytes of all parts.
    most_bytes: usize,
}

impl Sum {
    /// Adds a string that is no markup; returns any other value.
    fn take(&mut self, value: Value) -> Result<Option<Value>> {
        match value {
            Value::Str(s) if !s.markup => {
                self.most_bytes += s.text.most_bytes();
                self.parts.push(s);
                if self.parts.len() > 1
                    && self.most_bytes > ops::MAX_SIZE
                    && self.parts.iter().map(|part| part.text.len()).sum::<usize>() > ops::MAX_SIZE
                {
                    return raise("MemoryError: string too large");
                }
                Ok(None)
            }
            value => Ok(Some(value)),
        }
    }

    fn join(&self) -> Value {
        Value::str(self.parts.iter().map(|part| &*part.text).collect::<String>())
    }

    fn print(&self, out: &mut Output) {
        self.parts.iter().for_each(|part| out.push(&part.text));
    }
}

pub struct Interpreter {
    pub options: Options,
    pub root: Rc<Scope>,
    depth: usize,
    pub steps: u64,
    /// The rendering depends on the time.
    pub read_clock: bool,
    /// Rendered bodies that block filters are processing.
    bodies: Vec<Value>,
    /// Scopes captured by macros: they and their macros reference each other until cleared.
    captured: Vec<Rc<Scope>>,
    /// Values that a template mutated, by address: such a value may contain itself and thus keep itself
    /// alive.
    changed: HashMap<*const (), Value>,
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        for scope in &self.captured {
            let variables = std::mem::take(&mut *scope.variables.borrow_mut());
            drop(variables);
        }
        for value in self.changed.values() {
            match value {
                Value::List(items) => drop(std::mem::take(&mut *items.0.borrow_mut())),
                Value::Dict(dict) | Value::Namespace(dict) => drop(std::mem::take(&mut *dict.0.borrow_mut())),
                Value::Loop(state) => drop(state.changed.take()),
                _ => {}
            }
        }
    }
}

impl Interpreter {
    pub fn new(options: Options, context: Dict) -> Interpreter {
        let root = Rc::new(Scope { variables: RefCell::default(), parent: None });
        for (name, value) in &context.entries {
            if let Value::Str(name) = name {
                root.set(&name.text.to_arc(), value.clone());
            }
        }
        Interpreter {
            options,
            root,
            depth: 0,
            steps: 0,
            read_clock: false,
            bodies: Vec::new(),
            captured: Vec::new(),
            changed: HashMap::new(),
        }
    }

    /// Records that `value` was mutated.
    pub fn note_change(&mut self, value: &Value) {
        let address: *const () = match value {
            Value::List(items) => Rc::as_ptr(items).cast(),
            Value::Dict(dict) | Value::Namespace(dict) => Rc::as_ptr(dict).cast(),
            Value::Loop(state) => Rc::as_ptr(state).cast(),
            _ => return,
        };
        self.changed.entry(address).or_insert_with(|| value.clone());
    }

    pub fn render(&mut self, body: &[Stmt]) -> Result<Output> {
        let mut out = Output::default();
        let root = self.root.clone();
        self.run(body, &root, &mut out)?;
        Ok(out)
    }

    pub fn capture(&mut self, scope: &Rc<Scope>) {
        if !self.captured.iter().any(|held| Rc::ptr_eq(held, scope)) {
            self.captured.push(scope.clone());
        }
    }

    fn enter(&mut self) -> Result<()> {
        self.depth += 1;
        self.steps += 1;
        if self.depth > MAX_DEPTH {
            return raise("RecursionError: maximum recursion depth exceeded");
        }
        self.check_steps()
    }

    fn check_steps(&self) -> Result<()> {
        if self.steps > MAX_STEPS {
            return raise(format!("the template runs for more than {MAX_STEPS} steps"));
        }
        Ok(())
    }

    pub fn run(&mut self, body: &[Stmt], scope: &Rc<Scope>, out: &mut Output) -> Result<Flow> {
        for statement in body {
            self.enter()?;
            let flow = self.statement(statement, scope, out)?;
            self.depth -= 1;
            if out.is_longer_than(ops::MAX_SIZE) {
                return raise("MemoryError: the rendered text is too large");
            }
            if !matches!(flow, Flow::Next) {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    /// Renders `body` in its own scope.
    pub fn run_inside(&mut self, body: &[Stmt], scope: &Rc<Scope>) -> Result<Output> {
        let mut out = Output::default();
        self.run(body, &Scope::child(scope), &mut out)?;
        Ok(out)
    }

    fn statement(&mut self, statement: &Stmt, scope: &Rc<Scope>, out: &mut Output) -> Result<Flow> {
        match statement {
            Stmt::Text(text) => out.push_str(text),
            Stmt::Print(expr) => {
                let mut sum = Sum::default();
                match self.sum(expr, scope, &mut sum)? {
                    None => sum.print(out),
                    Some(Value::Str(s)) => out.push(&s.text),
                    Some(value) => out.push(&to_text(&value)?),
                }
            }
            Stmt::If { branches, otherwise } => {
                for (test, body) in branches {
                    if self.eval(test, scope)?.truthy() {
                        return self.run(body, scope, out);
                    }
                }
                return self.run(otherwise, scope, out);
            }
            Stmt::For(definition) => {
                let iterable = self.eval(&definition.iterable, scope)?;
                return self.for_loop(definition, iterable, scope, 0, out);
            }
            Stmt::Set(target, expr) => {
                let value = self.eval(expr, scope)?;
                self.assign(target, value, scope)?;
            }
            Stmt::SetBody { target, filters, body } => {
                let text = self.run_inside(body, scope)?;
                let value = self.through_filters(filters.as_ref(), text.into(), scope)?;
                self.assign(target, value, scope)?;
            }
            Stmt::FilterBlock { filters, body } => {
                let text = self.run_inside(body, scope)?;
                let value = self.through_filters(Some(filters), text.into(), scope)?;
                out.push(&to_text(&value)?);
            }
            Stmt::With { bindings, body } => {
                let inner = Scope::child(scope);
                for (target, expr) in bindings {
                    let value = self.eval(expr, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.run(body, &inner, out);
            }
            Stmt::Macro(definition) => {
                let closure = self.closure(definition, scope);
                scope.set(&definition.name, closure);
            }
            Stmt::CallBlock { caller, call } => {
                let caller = self.closure(caller, scope);
                let Expr::Call(callee, args) = call else {
                    return raise("expected call");
                };
                let callee = self.eval(callee, scope)?;
                let mut args = self.arguments(args, scope)?;
                args.keyword.push(("caller".into(), caller));
                let value = self.invoke(&callee, args)?;
                out.push(&to_text(&value)?);
            }
            Stmt::Block(body) => {
                let root = self.root.clone();
                out.append(self.run_inside(body, &root)?);
            }
            Stmt::Generation(body) => out.append(self.run_inside(body, scope)?),
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn through_filters(&mut self, filters: Option<&Expr>, text: Text, scope: &Rc<Scope>) -> Result<Value> {
        let text = Value::Str(Str { text, markup: false });
        let Some(filters) = filters else {
            return Ok(text);
        };
        self.bodies.push(text);
        let value = self.eval(filters, scope);
        self.bodies.pop();
        value
    }

    pub fn for_loop(
        &mut self,
        definition: &Arc<For>,
        iterable: Value,
        scope: &Rc<Scope>,
        depth: usize,
        out: &mut Output,
    ) -> Result<Flow> {
        let mut items = iterable.iterate()?;
        if let Some(condition) = &definition.condition {
            let mut kept = Vec::new();
            for item in items {
                let inner = Scope::child(scope);
                self.assign(&definition.target, item.clone(), &inner)?;
                if self.eval(condition, &inner)?.truthy() {
                    kept.push(item);
                }
            }
            items = kept;
        }
        if items.is_empty() {
            return self.run(&definition.otherwise, &Scope::child(scope), out);
        }
        let state = Rc::new(LoopState {
            items: Rc::new(Items(RefCell::new(items.clone()))),
            at: Cell::new(0),
            depth,
            changed: RefCell::new(None),
            recursive: definition.recursive.then(|| (definition.clone(), scope.clone())),
        });
        let loop_name: Arc<str> = "loop".into();
        for at in 0.. {
            let Some(item) = items.get(at) else { break };
            state.at.set(at);
            self.steps += 1;
            self.check_steps()?;
            let inner = Scope::child(scope);
            inner.set(&loop_name, Value::Loop(state.clone()));
            self.assign(&definition.target, item.clone(), &inner)?;
            if let Flow::Break = self.run(&definition.body, &inner, out)? {
                break;
            }
        }
        Ok(Flow::Next)
    }

    pub fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Result<()> {
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Tuple(targets) => {
                if let Value::Undefined(_) = value {
                    value.defined()?;
                }
                if !value.is_iterable() {
                    return raise(format!(
                        "TypeError: cannot unpack non-iterable {} object",
                        value.type_name()
                    ));
                }
                let items = value.iterate()?;
                if items.len() > targets.len() {
                    return raise(format!(
                        "ValueError: too many values to unpack (expected {})",
                        targets.len()
                    ));
                }
                if items.len() < targets.len() {
                    return raise(format!(
                        "ValueError: not enough values to unpack (expected {}, got {})",
                        targets.len(),
                        items.len()
                    ));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
            }
            Target::Attribute { namespace, attribute } => match self.name(namespace, scope) {
                Value::Namespace(_) if attribute.starts_with('_') => {
                    return raise(format!(
                        "SecurityError: a namespace cannot store the underscore-prefixed attribute '{attribute}'"
                    ));
                }
                Value::Namespace(dict) => {
                    dict.0.borrow_mut().insert(Value::str(attribute.clone()), value);
                    self.note_change(&Value::Namespace(dict));
                }
                _ => return raise("cannot assign attribute on non-namespace object"),
            },
        }
        Ok(())
    }

    fn name(&self, name: &Arc<str>, scope: &Rc<Scope>) -> Value {
        if let Some(value) = scope.lookup(name) {
            return value;
        }
        match &**name {
            "raise_exception" => Value::Function(Function::RaiseException),
            "strftime_now" => Value::Function(Function::StrftimeNow),
            "range" => Value::Function(Function::Range),
            "dict" => Value::Function(Function::Dict),
            "namespace" => Value::Function(Function::Namespace),
            "cycler" => Value::Function(Function::Cycler),
            "joiner" => Value::Function(Function::Joiner),
            "lipsum" => Value::Function(Function::Lipsum),
            _ => Value::undefined(format!("'{name}' is undefined")),
        }
    }

    pub fn eval(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value> {
        self.enter()?;
        let value = self.eval_inner(expr, scope)?;
        self.depth -= 1;
        Ok(value)
    }

    /// Evaluates an expression from left to right as `eval` does, without joining the strings of a sum. None:
    /// the value is the string of all parts of `sum`.
    fn sum(&mut self, expr: &Expr, scope: &Rc<Scope>, sum: &mut Sum) -> Result<Option<Value>> {
        let Expr::Binary(Binary::Add, left, right) = expr else {
            return sum.take(self.eval(expr, scope)?);
        };
        self.enter()?;
        let left = self.sum(left, scope, sum)?;
        let right = self.eval(right, scope)?;
        self.depth -= 1;
        match left {
            None if matches!(&right, Value::Str(s) if !s.markup) => sum.take(right),
            None => ops::binary(Binary::Add, &sum.join(), &right).map(Some),
            Some(left) => ops::binary(Binary::Add, &left, &right).map(Some),
        }
    }

    fn eval_all(&mut self, exprs: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>> {
        exprs.iter().map(|expr| self.eval(expr, scope)).collect()
    }

    fn eval_inner(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value> {
        Ok(match expr {
            Expr::Literal(literal) => match literal {
                Literal::None => Value::None,
                Literal::Bool(b) => Value::Bool(*b),
                Literal::Int(i) => Value::Int(*i),
                Literal::Float(f) => Value::Float(*f),
                Literal::Str(s) => Value::str(s.clone()),
            },
            Expr::Name(name) => self.name(name, scope),
            Expr::List(items) => Value::list(self.eval_all(items, scope)?),
            Expr::Tuple(items) => Value::tuple(self.eval_all(items, scope)?),
            Expr::Dict(entries) => {
                let mut dict = Dict::default();
                for (key, value) in entries {
                    let key = self.eval(key, scope)?;
                    ops::hashable(&key)?;
                    let value = self.eval(value, scope)?;
                    dict.insert(key, value);
                }
                Value::dict(dict)
            }
            Expr::Negate(of) => ops::negate(&self.eval(of, scope)?)?,
            Expr::Plus(of) => ops::plus(&self.eval(of, scope)?)?,
            Expr::Not(of) => Value::Bool(!self.eval(of, scope)?.truthy()),
            Expr::And(left, right) => {
                let left = self.eval(left, scope)?;
                if !left.truthy() {
                    return Ok(left);
                }
                self.eval(right, scope)?
            }
            Expr::Or(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truthy() {
                    return Ok(left);
                }
                self.eval(right, scope)?
            }
            Expr::Binary(op, left, right) => {
                let left = self.eval(left, scope)?;
                let right = self.eval(right, scope)?;
                ops::binary(*op, &left, &right)?
            }
            Expr::Concat(parts) => ops::concat(&self.eval_all(parts, scope)?)?,
            Expr::Compare(first, rest) => {
                let mut left = self.eval(first, scope)?;
                for (op, right) in rest {
                    let right = self.eval(right, scope)?;
                    if !ops::compare(*op, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            Expr::Conditional { test, then, otherwise } => {
                if self.eval(test, scope)?.truthy() {
                    self.eval(then, scope)?
                } else {
                    match otherwise {
                        Some(otherwise) => self.eval(otherwise, scope)?,
                        None => Value::undefined(
                            "the inline if-expression evaluated to false and no else section was defined.",
                        ),
                    }
                }
            }
            Expr::Attribute(of, name) => {
                let of = self.eval(of, scope)?;
                self.attribute(&of, name)?
            }
            Expr::Item(of, index) => {
                let of = self.eval(of, scope)?;
                let index = self.eval(index, scope)?;
                self.item(&of, &index)?
            }
            Expr::Slice { of, start, stop, step } => {
                let of = self.eval(of, scope)?;
                let mut bound = |part: &Option<Box<Expr>>| match part {
                    Some(expr) => self.eval(expr, scope),
                    None => Ok(Value::None),
                };
                let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?);
                ops::slice(&of, &start, &stop, &step)?
            }
            Expr::Call(callee, args) => {
                let callee = self.eval(callee, scope)?;
                let args = self.arguments(args, scope)?;
                self.invoke(&callee, args)?
            }
            Expr::Filter { name, of, args } => {
                let of = self.eval(of, scope)?;
                let args = self.arguments(args, scope)?;
                filters::apply(self, name, of, args)?
            }
            Expr::Test { name, of, args } => {
                let of = self.eval(of, scope)?;
                let args = self.arguments(args, scope)?;
                Value::Bool(tests::apply(name, &of, args)?)
            }
            Expr::Body => self.bodies.last().cloned().unwrap_or(Value::None),
        })
    }

    pub fn arguments(&mut self, args: &Args, scope: &Rc<Scope>) -> Result<CallArgs> {
        let mut positional = self.eval_all(&args.positional, scope)?;
        let mut keyword = Vec::new();
        for (name, expr) in &args.keyword {
            let value = self.eval(expr, scope)?;
            keyword.push((name.clone(), value));
        }
        if let Some(star) = &args.star {
            positional.extend(self.eval(star, scope)?.iterate()?);
        }
        if let Some(star_star) = &args.star_star {
            let Value::Dict(dict) = self.eval(star_star, scope)? else {
                return raise("TypeError: argument after ** must be a mapping");
            };
            for (key, value) in &dict.0.borrow().entries {
                let Value::Str(key) = key else {
                    return raise("TypeError: keywords must be strings");
                };
                keyword.push((key.text.to_arc(), value.clone()));
            }
        }
        Ok(CallArgs { positional, keyword })
    }

    /// `of.name`: an attribute or method, otherwise an element of that name.
    pub fn attribute(&self, of: &Value, name: &Arc<str>) -> Result<Value> {
        if let Some(found) = self.own_attribute(of, name)? {
            return Ok(found);
        }
        let key = Value::str(name.clone());
        Ok(ops::index(of, &key).unwrap_or_else(|| ops::missing(of, &key)))
    }

    /// `of[index]`: an element, otherwise an attribute of that name.
    pub fn item(&self, of: &Value, index: &Value) -> Result<Value> {
        of.defined()?;
        if let Some(found) = ops::index(of, index) {
            return Ok(found);
        }
        if let Value::Str(name) = index {
            if let Some(found) = self.own_attribute(of, &name.text.to_arc())? {
                return Ok(found);
            }
        }
        Ok(ops::missing(of, index))
    }

    /// Returns an attribute in Python's sense: methods and the fields of `loop`, namespaces and macros.
    pub fn own_attribute(&self, of: &Value, name: &Arc<str>) -> Result<Option<Value>> {
        of.defined()?;
        let forbidden = || {
            Value::undefined(format!(
                "SecurityError: access to attribute '{name}' of '{}' object is unsafe.",
                of.type_name()
            ))
        };
        if name.starts_with("__") {
            return Ok(Some(forbidden()));
        }
        let field = match of {
            Value::Namespace(dict) => dict.0.borrow().get_str(name).cloned(),
            Value::Loop(state) => state.field(name),
            Value::Macro(closure) if &**name == "name" => Some(Value::str(closure.definition.name.clone())),
            Value::Int(_) | Value::Bool(_) if matches!(&**name, "real" | "numerator") => {
                of.as_int().map(Value::Int)
            }
            Value::Int(_) | Value::Bool(_) if &**name == "imag" => Some(Value::Int(0)),
            Value::Int(_) | Value::Bool(_) if &**name == "denominator" => Some(Value::Int(1)),
            Value::Float(f) if &**name == "real" => Some(Value::Float(*f)),
            Value::Float(_) if &**name == "imag" => Some(Value::Float(0.0)),
            // The pairs that `groupby` returns have named fields.
            Value::Tuple(items) if matches!(&**name, "grouper" | "list") && items.0.borrow().len() == 2 => {
                items.0.borrow().get(usize::from(&**name == "list")).cloned()
            }
            Value::Cycler(cycler) if &**name == "current" => {
                cycler.0 .0.borrow().get(cycler.1.get()).cloned()
            }
            _ => None,
        };
        if field.is_some() {
            return Ok(field);
        }
        Ok(match lookup(of, name, self.options.may_mutate) {
            Lookup::Found => Some(Value::Method(Rc::new((of.clone(), name.clone())))),
            Lookup::Forbidden => Some(forbidden()),
            Lookup::Absent => None,
        })
    }
}

impl LoopState {
    fn field(&self, name: &str) -> Option<Value> {
        let (at, length) = (self.at.get(), self.items.0.borrow().len());
        let neighbour = |at: Option<usize>, message: &str| {
            let found = at.and_then(|at| self.items.0.borrow().get(at).cloned());
            found.unwrap_or_else(|| Value::undefined(message))
        };
        Some(match name {
            "index" => Value::Int(at as i128 + 1),
            "index0" => Value::Int(at as i128),
            "revindex" => Value::Int((length - at) as i128),
            "revindex0" => Value::Int((length - at) as i128 - 1),
            "first" => Value::Bool(at == 0),
            "last" => Value::Bool(at + 1 == length),
            "length" => Value::Int(length as i128),
            "depth" => Value::Int(self.depth as i128 + 1),
            "depth0" => Value::Int(self.depth as i128),
            "previtem" => neighbour(at.checked_sub(1), "there is no previous item"),
            "nextitem" => neighbour(Some(at + 1), "there is no next item"),
            _ => return None,
        })
    }
}
