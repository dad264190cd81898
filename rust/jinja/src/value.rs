//! The values of a template: Python's, as far as a template can observe.

use super::ast::Macro;
use super::error::{raise, Result};
use super::quoted::Text;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// A string; `markup` marks the result of the `escape` filter, which escapes strings joined to it.
#[derive(Clone, Debug)]
pub struct Str {
    pub text: Text,
    pub markup: bool,
}

#[derive(Clone)]
pub enum Value {
    Undefined(Rc<Missing>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Str),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<DictCell>),
    Range(i128, i128, i128),
    /// `dict.keys()`, `.values()`, `.items()`.
    View(View, Rc<DictCell>),
    /// A generator or iterator: its remaining elements.
    Iterator(Rc<OneShot>),
    Namespace(Rc<DictCell>),
    Loop(Rc<LoopState>),
    Macro(Rc<Closure>),
    Function(Function),
    /// A method bound to its object.
    Method(Rc<(Value, Arc<str>)>),
    Cycler(Rc<(Items, Cell<usize>)>),
    Joiner(Rc<(Value, Cell<bool>)>),
}

/// The functions visible to every template.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Function {
    RaiseException,
    StrftimeNow,
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    Lipsum,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum View {
    Keys,
    Values,
    Items,
}

/// The message of the error that the use of a missing value raises.
pub struct Missing(pub String);

/// The elements of a list or tuple. Dropped without recursion, because a template can nest them without
/// bound.
pub struct Items(pub RefCell<Vec<Value>>);

impl Drop for Items {
    fn drop(&mut self) {
        drop_flat(std::mem::take(self.0.get_mut()));
    }
}

/// Drops values one level at a time: values freed meanwhile are queued instead of dropped recursively.
fn drop_flat(values: Vec<Value>) {
    thread_local! {
        static QUEUE: RefCell<Option<Vec<Value>>> = const { RefCell::new(None) };
    }
    if values.is_empty() {
        return;
    }
    let running = QUEUE.with(|queue| match queue.borrow_mut().as_mut() {
        Some(queue) => {
            queue.extend(values.into_iter());
            None
        }
        None => Some(values),
    });
    let Some(first) = running else { return };
    QUEUE.with(|queue| *queue.borrow_mut() = Some(first));
    while let Some(value) = QUEUE.with(|queue| queue.borrow_mut().as_mut().and_then(Vec::pop)) {
        drop(value);
    }
    QUEUE.with(|queue| *queue.borrow_mut() = None);
}

/// A dictionary in insertion order.
#[derive(Default)]
pub struct DictCell(pub RefCell<Dict>);

impl Drop for DictCell {
    fn drop(&mut self) {
        let entries = std::mem::take(&mut self.0.get_mut().entries);
        drop_flat(entries.into_iter().flat_map(|(key, value)| [key, value]).collect());
    }
}

#[derive(Default, Clone)]
pub struct Dict {
    pub entries: Vec<(Value, Value)>,
    /// Position of each string key.
    index: HashMap<Arc<str>, usize>,
}

impl Dict {
    fn position(&self, key: &Value) -> Option<usize> {
        match key {
            Value::Str(s) => self.index.get(&*s.text).copied(),
            _ => self.entries.iter().position(|(k, _)| !matches!(k, Value::Str(_)) && equal(k, key)),
        }
    }

    pub fn get(&self, key: &Value) -> Option<&Value> {
        self.position(key).map(|at| &self.entries[at].1)
    }

    pub fn get_str(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&at| &self.entries[at].1)
    }

    pub fn insert(&mut self, key: Value, value: Value) {
        match self.position(&key) {
            Some(at) => self.entries[at].1 = value,
            None => {
                if let Value::Str(s) = &key {
                    self.index.insert(s.text.to_arc(), self.entries.len());
                }
                self.entries.push((key, value));
            }
        }
    }

    pub fn remove(&mut self, key: &Value) -> Option<Value> {
        let at = self.position(key)?;
        let (_, value) = self.entries.remove(at);
        self.index.clear();
        for (i, (k, _)) in self.entries.iter().enumerate() {
            if let Value::Str(s) = k {
                self.index.insert(s.text.to_arc(), i);
            }
        }
        Some(value)
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.index.clear();
    }
}

pub struct OneShot {
    /// Python's name of the type, for messages.
    pub kind: &'static str,
    /// Remaining elements, last first.
    pub rest: Items,
}

pub struct LoopState {
    pub items: Rc<Items>,
    pub at: Cell<usize>,
    pub depth: usize,
    pub changed: RefCell<Option<Value>>,
    /// A recursive loop: its body and the scope of its definition.
    pub recursive: Option<(Arc<super::ast::For>, Rc<Scope>)>,
}

pub struct Closure {
    pub definition: Arc<Macro>,
    pub scope: Rc<Scope>,
}

/// Variables of one block, and the enclosing block.
pub struct Scope {
    pub variables: RefCell<HashMap<Arc<str>, Value>>,
    pub parent: Option<Rc<Scope>>,
}

impl Scope {
    pub fn child(parent: &Rc<Scope>) -> Rc<Scope> {
        Rc::new(Scope { variables: RefCell::default(), parent: Some(parent.clone()) })
    }

    pub fn lookup(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some(value) = scope.variables.borrow().get(name) {
                return Some(value.clone());
            }
            scope = scope.parent.as_deref()?;
        }
    }

    pub fn set(&self, name: &Arc<str>, value: Value) {
        self.variables.borrow_mut().insert(name.clone(), value);
    }
}

impl Value {
    pub fn str(text: impl Into<Arc<str>>) -> Value {
        Value::Str(Str { text: Text::Plain(text.into()), markup: false })
    }

    pub fn list(items: Vec<Value>) -> Value {
        Value::List(Rc::new(Items(RefCell::new(items))))
    }

    pub fn tuple(items: Vec<Value>) -> Value {
        Value::Tuple(Rc::new(Items(RefCell::new(items))))
    }

    pub fn dict(dict: Dict) -> Value {
        Value::Dict(Rc::new(DictCell(RefCell::new(dict))))
    }

    pub fn generator(items: Vec<Value>) -> Value {
        Value::iterator("generator", items)
    }

    pub fn iterator(kind: &'static str, mut items: Vec<Value>) -> Value {
        items.reverse();
        Value::Iterator(Rc::new(OneShot { kind, rest: Items(RefCell::new(items)) }))
    }

    pub fn undefined(message: impl Into<String>) -> Value {
        Value::Undefined(Rc::new(Missing(message.into())))
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(s) => Some(&s.text),
            _ => None,
        }
    }

    /// Returns Python's name of the type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(s) if s.markup => "Markup",
            Value::Str(_) => "str",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::Range(..) => "range",
            Value::View(View::Keys, _) => "dict_keys",
            Value::View(View::Values, _) => "dict_values",
            Value::View(View::Items, _) => "dict_items",
            Value::Iterator(iterator) => iterator.kind,
            Value::Namespace(_) => "TemplateNamespace",
            Value::Loop(_) => "LoopContext",
            Value::Macro(_) => "Macro",
            Value::Function(Function::Dict) => "TemplateDict",
            Value::Function(Function::Namespace | Function::Cycler | Function::Joiner | Function::Range) => {
                "type"
            }
            Value::Function(_) => "function",
            Value::Method(_) => "builtin_function_or_method",
            Value::Cycler(_) => "Cycler",
            Value::Joiner(_) => "Joiner",
        }
    }

    /// Returns Jinja2's name of an object in "has no attribute" messages.
    pub fn object_name(&self) -> String {
        match self {
            Value::None => "None".into(),
            Value::Namespace(_) => "transformers.utils.chat_template_utils.TemplateNamespace object".into(),
            Value::Loop(_) => "jinja2.runtime.LoopContext object".into(),
            Value::Macro(_) => "jinja2.runtime.Macro object".into(),
            _ => format!("{} object", self.type_name()),
        }
    }

    pub fn truthy(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(b) => *b,
            Value::Int(i) => *i != 0,
            Value::Float(f) => *f != 0.0,
            Value::Str(s) => !s.text.is_empty(),
            Value::List(items) | Value::Tuple(items) => !items.0.borrow().is_empty(),
            Value::Dict(dict) | Value::View(_, dict) => !dict.0.borrow().entries.is_empty(),
            Value::Range(start, stop, step) => range_length(*start, *stop, *step) > 0,
            Value::Loop(state) => !state.items.0.borrow().is_empty(),
            _ => true,
        }
    }

    /// Returns the value of a number; a bool counts as 0 or 1.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(i) => Some(*i),
            Value::Bool(b) => Some(i128::from(*b)),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(f) => Some(*f),
            _ => self.as_int().map(|i| i as f64),
        }
    }

    /// `len()`, or a TypeError.
    pub fn length(&self) -> Result<usize> {
        Ok(match self {
            Value::Undefined(_) => 0,
            Value::Str(s) => s.text.chars().count(),
            Value::List(items) | Value::Tuple(items) => items.0.borrow().len(),
            Value::Dict(dict) | Value::View(_, dict) => dict.0.borrow().entries.len(),
            Value::Range(start, stop, step) => range_length(*start, *stop, *step),
            Value::Loop(state) => state.items.0.borrow().len(),
            _ => return raise(format!("TypeError: object of type '{}' has no len()", self.type_name())),
        })
    }

    /// Returns the elements in order; a one-shot iterator is exhausted.
    pub fn iterate(&self) -> Result<Vec<Value>> {
        Ok(match self {
            Value::Undefined(_) => Vec::new(),
            Value::Str(s) => s.text.chars().map(|c| Value::str(c.to_string())).collect(),
            Value::List(items) | Value::Tuple(items) => items.0.borrow().clone(),
            Value::Dict(dict) | Value::View(View::Keys, dict) => {
                dict.0.borrow().entries.iter().map(|(key, _)| key.clone()).collect()
            }
            Value::View(View::Values, dict) => {
                dict.0.borrow().entries.iter().map(|(_, v)| v.clone()).collect()
            }
            Value::View(View::Items, dict) => dict.0.borrow().pairs(),
            Value::Range(start, stop, step) => (0..range_length(*start, *stop, *step))
                .map(|i| Value::Int(start + step * i as i128))
                .collect(),
            Value::Iterator(iterator) => {
                let mut rest = std::mem::take(&mut *iterator.rest.0.borrow_mut());
                rest.reverse();
                rest
            }
            Value::Loop(state) => {
                let items = state.items.0.borrow();
                let from = (state.at.get() + 1).min(items.len());
                state.at.set(items.len().saturating_sub(1));
                items[from..].to_vec()
            }
            _ => return raise(format!("TypeError: '{}' object is not iterable", self.type_name())),
        })
    }

    pub fn is_iterable(&self) -> bool {
        matches!(
            self,
            Value::Undefined(_)
                | Value::Str(_)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Dict(_)
                | Value::View(..)
                | Value::Range(..)
                | Value::Iterator(_)
                | Value::Loop(_)
        )
    }

    /// Returns the error for a use that an undefined value does not allow.
    pub fn defined(&self) -> Result<&Value> {
        match self {
            Value::Undefined(missing) => raise(missing.0.clone()),
            _ => Ok(self),
        }
    }
}

impl Dict {
    pub fn pairs(&self) -> Vec<Value> {
        self.entries.iter().map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()])).collect()
    }
}

pub fn range_length(start: i128, stop: i128, step: i128) -> usize {
    let length = match step {
        0 => 0,
        1.. => (stop - start + step - 1) / step,
        _ => (start - stop - step - 1) / -step,
    };
    length.max(0) as usize
}

/// Python's `==`. Values nested too deeply compare unequal.
pub fn equal(a: &Value, b: &Value) -> bool {
    equal_within(a, b, 200)
}

fn equal_within(a: &Value, b: &Value, depth: usize) -> bool {
    if depth == 0 {
        return false;
    }
    let same = |a: &Items, b: &Items| {
        std::ptr::eq(a, b) || {
            let (a, b) = (a.0.borrow(), b.0.borrow());
            a.len() == b.len() && a.iter().zip(b.iter()).all(|(x, y)| equal_within(x, y, depth - 1))
        }
    };
    match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(x), Value::Str(y)) => x.text == y.text,
        (Value::List(x), Value::List(y)) | (Value::Tuple(x), Value::Tuple(y)) => same(x, y),
        (Value::Dict(x), Value::Dict(y)) => {
            Rc::ptr_eq(x, y) || {
                let (x, y) = (x.0.borrow(), y.0.borrow());
                x.entries.len() == y.entries.len()
                    && x.entries.iter().all(|(k, v)| y.get(k).is_some_and(|w| equal_within(v, w, depth - 1)))
            }
        }
        (Value::Range(a0, a1, a2), Value::Range(b0, b1, b2)) => (a0, a1, a2) == (b0, b1, b2),
        _ => match (a.as_int(), b.as_int()) {
            (Some(x), Some(y)) => x == y,
            _ => match (a.as_float(), b.as_float()) {
                (Some(x), Some(y)) => x == y,
                _ => same_object(a, b),
            },
        },
    }
}

/// Python's `is`, as implemented by the `sameas` test.
pub fn same_object(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(x), Value::Bool(y)) => x == y,
        (Value::Int(x), Value::Int(y)) => x == y,
        (Value::Str(x), Value::Str(y)) => x.text == y.text,
        (Value::List(x), Value::List(y)) | (Value::Tuple(x), Value::Tuple(y)) => Rc::ptr_eq(x, y),
        (Value::Dict(x), Value::Dict(y)) | (Value::Namespace(x), Value::Namespace(y)) => Rc::ptr_eq(x, y),
        (Value::Function(x), Value::Function(y)) => x == y,
        (Value::Macro(x), Value::Macro(y)) => Rc::ptr_eq(x, y),
        (Value::Iterator(x), Value::Iterator(y)) => Rc::ptr_eq(x, y),
        _ => false,
    }
}

/// Python's ordering; `op` names the operator for the TypeError.
pub fn order(a: &Value, b: &Value, op: &str) -> Result<std::cmp::Ordering> {
    order_within(a, b, op, 200)
}

fn order_within(a: &Value, b: &Value, op: &str, depth: usize) -> Result<std::cmp::Ordering> {
    use std::cmp::Ordering;
    a.defined()?;
    b.defined()?;
    match (a, b) {
        (Value::Str(x), Value::Str(y)) => Ok(x.text.cmp(&y.text)),
        (Value::List(x), Value::List(y)) | (Value::Tuple(x), Value::Tuple(y)) if depth > 0 => {
            let (x, y) = (x.0.borrow(), y.0.borrow());
            for (p, q) in x.iter().zip(y.iter()) {
                if !equal(p, q) {
                    return order_within(p, q, op, depth - 1);
                }
            }
            Ok(x.len().cmp(&y.len()))
        }
        _ => match (a.as_int(), b.as_int()) {
            (Some(x), Some(y)) => Ok(x.cmp(&y)),
            _ => match (a.as_float(), b.as_float()) {
                // A NaN is neither less nor greater: Equal would be wrong only for `<=`, which templates do
                // not use.
                (Some(x), Some(y)) => Ok(x.partial_cmp(&y).unwrap_or(Ordering::Equal)),
                _ => raise(format!(
                    "TypeError: '{op}' not supported between instances of '{}' and '{}'",
                    a.type_name(),
                    b.type_name()
                )),
            },
        },
    }
}
